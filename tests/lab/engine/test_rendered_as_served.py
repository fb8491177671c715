"""Bodies of all four APIs on a real server: each way of rendering gives the ids that its engine had, or refuses."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvtune.base.errors import UsageError
from kvtune.data.layout.models import builtin
from kvtune.requests.log.bodies import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Rendered, body_of
from kvtune.requests.log.rendering import Rendering, renderer
from kvtune.servers.watch.rendering import OWN, ServerRendering
from kvtune.servers.watch.server import Server
from tests.lab.engine.test_watch import stock
from tests.tokenizers import make_tokenizer

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1500)]
pytest.importorskip("vllm")

ASKED = {"role": "user", "content": "Hi 東京"}
YO = {"role": "assistant", "content": "Yo", "reasoning_content": "hm"}
BRIEF = "Be brief.\nNo jokes."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "weather", "description": "The weather", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}
SEEN = [
    {"type": "thinking", "thinking": "hm", "signature": "s"},
    {"type": "text", "text": "Let me see."},
    {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Bonn"}},
]
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sun"}]}
BLOCKS = [
    {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
    {"type": "text", "text": BRIEF, "cache_control": {"type": "ephemeral"}},
    {"type": "text", "text": " Be kind."},
]
LEFT = {"role": "system", "content": "5 tokens left"}
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (CHAT, {"messages": [{"role": "system", "content": BRIEF}, ASKED, YO, ASKED]}),
    (CHAT, {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                         {"role": "tool", "tool_call_id": "1", "content": "sun"}], "tools": [FUNCTION]}),
    (CHAT, {"messages": [ASKED], "chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"messages": [ASKED], "reasoning_effort": "none", "tools": [FUNCTION], "tool_choice": "none"}),
    (CHAT, {"messages": [ASKED, YO], "add_generation_prompt": False, "continue_final_message": True}),
    (COMPLETIONS, {"prompt": "Once upon a time, in 東京"}),
    (COMPLETIONS, {"prompt": "Hi", "add_special_tokens": False}),
    (RESPONSES, {"input": "Hi", "instructions": BRIEF}),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                           {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
                           {"type": "function_call_output", "call_id": "1", "output": "sun"}],
                 "tools": [{"type": "function", **FUNCTION["function"]}]}),  # type: ignore[dict-item]
    (MESSAGES, {"messages": [ASKED], "system": BRIEF}),
    (MESSAGES, {"messages": [ASKED], "system": BLOCKS, "tools": [TOOL], "tool_choice": {"type": "auto"}}),
    (MESSAGES, {"messages": [ASKED, {"role": "assistant", "content": SEEN},
                             {"role": "user", "content": [{"type": "text", "text": "And now?"}, RESULT]}],
                "system": BLOCKS, "tools": [TOOL], "metadata": {"user_id": "u"}}),
    (MESSAGES, {"messages": [ASKED, {"role": "assistant", "content": "Yo"}, LEFT, ASKED], "system": BRIEF}),
    (MESSAGES, {"messages": [ASKED], "thinking": {"type": "disabled"}}),
    (CHAT, {"messages": [{"role": "user", "content": [PICTURE]}]}),
    (MESSAGES, {"messages": [ASKED], "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
)  # fmt: skip


def counted(base: str, api: str, body: dict[str, Any]) -> tuple[int, list[int]]:
    """How many prompt tokens the engine had, and which if the API says so; 0 if the request was refused."""
    asked = {**body, "model": "tiny-llama", "temperature": 0}
    asked["max_output_tokens" if api == RESPONSES else "max_tokens"] = 2
    asked |= {"return_token_ids": True} if api in (CHAT, COMPLETIONS) else {}
    answer = httpx.post(base + api, json=asked, timeout=300)
    if answer.status_code != 200:
        assert answer.status_code in (400, 422), answer.text
        return 0, []
    said = answer.json()
    usage = said["usage"]
    if api == MESSAGES:
        names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        return sum(usage.get(name) or 0 for name in names), []
    choice = (said.get("choices") or [{}])[0]
    ids = said.get("prompt_token_ids") or choice.get("prompt_token_ids") or []
    return usage["input_tokens" if api == RESPONSES else "prompt_tokens"], ids


def test_each_way_gives_the_tokens_that_the_engine_had(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "model", "chatml")
    shape = builtin("tiny-llama")
    assert shape is not None
    (folder / "config.json").write_bytes((shape / "config.json").read_bytes())
    serving = stock(
        tmp_path,
        "tiny-llama",
        served_from=folder,
        enable_scale_out="",
        enable_auto_tool_choice="",
        tool_call_parser="hermes",
    )
    with serving as base, closing(Server(base)) as server:
        served = [counted(base, api, body) for api, body in BODIES]
        bodies = [body_of(body, api) for api, body in BODIES]
        ways = (ServerRendering(server), renderer(str(folder)), Rendering(str(folder)))
        made = [list(by.render(bodies)) for by in ways]
        assert ways[0].how == OWN and ways[1].how.startswith("the renderer of vLLM ")
    with_ids = 0
    for number, (length, ids) in enumerate(served):
        for answers in made:
            one = answers[number]
            if not length:
                assert isinstance(one, UsageError), (BODIES[number], one)
                continue
            assert isinstance(one, Rendered), (BODIES[number], one)
            assert len(one.ids) == length, BODIES[number]
            assert not ids or list(one.ids) == ids, BODIES[number]
            assert list(one.ids) == list(made[0][number].ids)  # type: ignore[union-attr]
        with_ids += bool(ids)
    assert with_ids == 7 and [length for length, _ in served].count(0) == 2
