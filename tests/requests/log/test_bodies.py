"""A body's API and its fields: each is rendered, or known not to change the prompt, or refused by its name."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any, Protocol

import pytest

from kvtune.base.errors import UsageError
from kvtune.requests.log.bodies import (
    APIS,
    CHAT,
    COMPLETIONS,
    ELSEWHERE,
    MESSAGES,
    READ,
    RESPONSES,
    UNSEEN,
    body_of,
)
from kvtune.requests.log.logged import Logged
from kvtune.requests.log.rendering import renderer
from kvtune.requests.log.requests_log import read_log
from tests.tokenizers import TEMPLATES, OneChild, make_tokenizer

ASKED = {"role": "user", "content": "Hi"}
TOOL = {"name": "weather", "description": "w", "input_schema": {"properties": {"city": {"type": "string"}}}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "sun"}]}
REMINDER = {"role": "system", "content": "5 tokens left"}


class TextOf(Protocol):
    def __call__(self, folder: Path | str, **body: Any) -> str: ...


@pytest.fixture
def text_of(child: OneChild) -> TextOf:
    def text(folder: Path | str, **body: Any) -> str:
        by = child.load(folder) if isinstance(folder, Path) else renderer(folder)
        return by.text(by.ids(body))

    return text


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizers") / "chatml", "chatml")


@pytest.mark.vllm
def test_every_field_of_vllms_requests_is_on_a_list() -> None:
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    classes = (ChatCompletionRequest, CompletionRequest, ResponsesRequest, AnthropicMessagesRequest)
    for api, kind in zip(APIS, classes, strict=True):
        assert set(kind.model_fields) <= READ[api] | UNSEEN | set(ELSEWHERE), api
        assert READ[api] <= set(kind.model_fields)
    for api in APIS:
        assert not READ[api] & UNSEEN and not UNSEEN & set(ELSEWHERE)


@pytest.mark.parametrize(
    ("body", "api"),
    [
        ({"messages": [ASKED]}, CHAT),
        ({"messages": [ASKED], "system": "Be brief."}, MESSAGES),
        ({"messages": [ASKED], "tools": [TOOL]}, MESSAGES),
        ({"messages": [ASKED], "tools": [{"type": "function", "function": {"name": "f"}}]}, CHAT),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, MESSAGES),
        ({"messages": [ASKED], "tool_choice": {"type": "any"}}, MESSAGES),
        ({"messages": [ASKED], "tool_choice": {"type": "function", "function": {"name": "f"}}}, CHAT),
        ({"input": "Hi"}, RESPONSES),
        ({"prompt": "Hi"}, COMPLETIONS),
    ],
)
def test_a_bodys_fields_tell_its_api(body: dict[str, Any], api: str) -> None:
    assert body_of(body).api == api
    assert body_of({"messages": [ASKED]}, "http://host/v1/messages?beta=true").api == MESSAGES


def test_system_messages_between_others_stay_where_the_template_takes_them(
    chatml: Path, tmp_path: Path, text_of: TextOf
) -> None:
    guard = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    guarded = "{% for m in messages %}" + guard + "{% endfor %}" + TEMPLATES["chatml"]
    strict = make_tokenizer(tmp_path / "strict", text=guarded)
    turns = [ASKED, {"role": "assistant", "content": "Yo"}, REMINDER, ASKED]
    kept, moved = (text_of(folder, system="Be brief.", messages=turns) for folder in (chatml, strict))
    assert "<|im_start|>system\nBe brief.<|im_end|>" in kept and "<|im_start|>system\n5 tokens left" in kept
    assert moved.startswith("<|im_start|>system\nBe brief.5 tokens left<|im_end|>")


def test_disabled_thinking_is_the_effort_that_the_template_does_not_ignore(
    chatml: Path, tmp_path: Path, text_of: TextOf
) -> None:
    off = {"messages": [ASKED], "thinking": {"type": "disabled"}}
    assert text_of(chatml, **off).endswith("<think>\n\n</think>\n\n")
    effort = "{{ reasoning_effort if reasoning_effort in ('low', 'high') else 'max' }}"
    glm = make_tokenizer(tmp_path / "glm", text=effort + "{{ messages[0].content }}")
    assert text_of(glm, **off) == "lowHi"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": [ASKED], "system_prompt": "Be brief."}, "system_prompt in a body of /v1/chat/completions"),
        ({"messages": [ASKED], "system": "s", "mcp_servers": [{"url": "x"}]}, r"tools of other servers \(mcp_servers"),
        ({"messages": [ASKED], "functions": [{"name": "f"}]}, "functions in a form"),
        ({"messages": [{**ASKED, "function_call": {"name": "f"}}]}, "function_call in a user message"),
        ({"messages": [{"role": "tool", "content": "x"}], "system": "s"}, "a tool message in a body of /v1/messages"),
        ({"messages": [ASKED], "tools": [{"type": "web_search_20250305", "name": "web"}]}, "the tool web without"),
        ({"messages": [ASKED], "tools": [{**TOOL, "input_examples": [{}]}]}, "input_examples in the tool weather"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "has image in a user message"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "has document in a user message"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}]}, "image in a tool"),
        ({"messages": [{"role": "user", "content": [{**RESULT, "more": 1}]}]}, "more in tool_result of a user message"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "note": "y"}]}]}, "note in text of"),
        ({"input": "Hi", "truncation": "auto"}, r"truncated by the server \(truncation"),
        ({"input": "Hi", "prompt": {"id": "p"}}, "a prompt that the server keeps"),
        ({"prompt": "Hi", "suffix": "x"}, "text to fill in"),
        ({"messages": [ASKED], "chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": [ASKED], "previous_response_id": "r"}, "previous_response_id"),
        *(
            ({"messages": [{"role": "user", "content": [part]}]}, f"{kind} in a user message: only text can be")
            for kind, part in (
                ("image_url", {"image_url": "http://example.org/a.png"}),
                *((kind, {"type": kind}) for kind in ("image_url", "input_audio", "video_url", "input_file")),
            )
        ),
        ({"prompt": "Hi", "kv_transfer_params": {"prompt_token_ids": [1]}}, "its prompt from another server"),
    ],
)  # fmt: skip
def test_what_may_change_the_prompt_and_is_not_understood_is_refused_with_line_and_field(
    tmp_path: Path, body: dict[str, Any], named: str
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"body": {"prompt": "Hi"}}) + "\n" + json.dumps({"body": body}) + "\n")
    with pytest.raises(UsageError, match=rf"log\.jsonl, line 2 .*{named}"):
        list(read_log(log, renderer("bytes").render))


def logged(file: Path, row: dict[str, Any]) -> Logged:
    file.write_text(json.dumps(row))
    (read,) = read_log(file, renderer("bytes").render)
    return read


def test_a_line_that_is_body_and_log_in_one_may_have_notes_but_no_unknown_text(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    notes = {"t0": 5, "host": "gpu-7", "latency": 0.5, "headers": {"a": "b"}, "ok": True}
    assert len(logged(log, {"messages": [ASKED], **notes}).prompt) == len(b"user\nHi\n")
    with pytest.raises(UsageError, match="line 1 has system_prompt in a body"):
        logged(log, {"messages": [ASKED], **notes, "system_prompt": "Be brief. " * 9})


def test_an_answer_of_anthropics_has_hits_and_text(tmp_path: Path) -> None:
    usage = {"input_tokens": 3, "cache_read_input_tokens": 64, "output_tokens": 2}
    answer = {"type": "message", "content": [{"type": "text", "text": "Yo"}], "usage": usage}
    body = {"messages": [ASKED], "system": "Be brief.", "max_tokens": 9}
    read = logged(tmp_path / "log.jsonl", {"body": body, "response": answer})
    assert (read.hit, read.output_tokens, list(read.answer)) == (64, 2, [*b"Yo"])
    thought = {**answer, "content": [{"type": "thinking", "thinking": "hm"}, *answer["content"]]}  # type: ignore[misc]
    assert not logged(tmp_path / "log.jsonl", {"body": body, "response": thought}).answer
