"""Random bodies of the chat, the responses and the messages API: rendered, or refused, as vLLM does it."""

from __future__ import annotations

import json
import logging
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.base.errors import UsageError
from kvtune.requests.log.bodies import MESSAGES, body_of
from kvtune.requests.log.rendering import renderer
from tests.choice import first_of
from tests.tokenizers import TEMPLATES, make_tokenizer

pytestmark = pytest.mark.vllm
BODIES = 220
TEXTS = ("Hi", " yo ", "東京 🚀", "a\nb", "<think>\nx\n</think>\n\ny", "", '{"a": 1}')
BILLED = "x-anthropic-billing-header: 1\nBe brief."
KWARGS = ({"enable_thinking": False}, {"date_string": "x"}, {"reasoning_effort": "low"}, {"other": 1})
SCHEMAS: tuple[Any, ...] = (None, {"type": "object", "properties": {}}, {"z": 1, "a": {"b": 2}})


class Bodies:
    """Drawn at random."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def likely(self, share: float) -> bool:
        return self.draw.random() < share

    def text(self) -> str:
        return self.draw.choice(TEXTS)

    def content(self) -> Any:
        parts = [{"type": "text", "text": self.text()} for _ in range(self.draw.randrange(1, 3))]
        return self.draw.choice((self.text(), parts))

    def tool(self) -> dict[str, Any]:
        function = {
            "name": "f",
            "description": self.text(),
            "parameters": self.draw.choice(SCHEMAS),
            "other": 1,
        }
        if self.likely(0.5):
            del function["description"]
        if self.likely(0.3):
            function["strict"] = self.likely(0.5)
        return function

    def chat(self) -> dict[str, Any]:
        turns: list[dict[str, Any]] = []
        if self.likely(0.5):
            said = self.draw.choice((self.content(), BILLED))
            turns.append({"role": self.draw.choice(("system", "system", "developer")), "content": said})
        for _ in range(self.draw.randrange(1, 4)):
            turns.append({"role": "user", "content": self.content()})
            if self.likely(0.1):
                turns.append({"role": self.draw.choice(("system", "developer")), "content": self.text()})
            answer = {"role": "assistant", "content": self.draw.choice((None, self.content()))}
            if self.likely(0.4):
                answer[self.draw.choice(("reasoning", "reasoning_content"))] = self.text()
            calls = self.draw.randrange(3) if self.likely(0.3) else 0
            for _ in range(calls):
                arguments = self.draw.choice(('{"b": 1, "a": 2}', "[1]", "x", ""))
                call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
                answer.setdefault("tool_calls", []).append(call)
            turns.append(answer)
            turns += [{"role": "tool", "tool_call_id": "1", "content": self.content()}] * calls
        if self.likely(0.8):
            turns.append({"role": "user", "content": self.content()})
        body = {"model": "m", "messages": turns}
        if self.likely(0.4):
            body["tools"] = [{"type": "function", "function": self.tool()} for _ in range(2)]
        if self.likely(0.3):
            body["reasoning_effort"] = self.draw.choice(("none", "low", "high"))
        if self.likely(0.3):
            body["chat_template_kwargs"] = self.draw.choice(KWARGS)
        return body

    def items(self) -> dict[str, Any]:
        items: list[dict[str, Any]] = []
        for _ in range(self.draw.randrange(1, 3)):
            items.append({"role": "user", "content": [{"type": "input_text", "text": self.text()}]})
            if self.likely(0.4):
                thought = {"type": "reasoning_text", "text": self.text()}
                items.append({"type": "reasoning", "id": "r", "summary": [], "content": [thought]})
            if self.likely(0.5):
                said = {"type": "output_text", "text": self.text(), "annotations": []}
                spoken = {"type": "message", "id": "m", "status": "completed", "role": "assistant"}
                items.append({**spoken, "content": [said]})
            for _ in range(self.draw.randrange(3)):
                items.append({"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'})
                items.append({"type": "function_call_output", "call_id": "1", "output": self.text()})
        body = {"model": "m", "input": [*items, {"role": "user", "content": self.text()}]}
        if self.likely(0.2):
            body["input"] = "Hi"
        if self.likely(0.5):
            body["instructions"] = "Be brief."
        if self.likely(0.4):
            body["tools"] = [{"type": "function", "strict": None, "parameters": None, **self.tool()}]
        if self.likely(0.3):
            body["reasoning"] = {"effort": "low"}
        return body

    def messages(self) -> dict[str, Any]:
        """A body of Anthropic's, with system messages between the others now and then."""
        turns: list[dict[str, Any]] = []
        for _ in range(self.draw.randrange(1, 4)):
            turns.append({"role": "user", "content": self.content()})
            if self.likely(0.2):
                said = self.draw.choice((self.content(), BILLED, "<reminder>"))
                turns.append({"role": "system", "content": said})
            answer: list[dict[str, Any]] = []
            if self.likely(0.4):
                answer.append({"type": "thinking", "thinking": self.text(), "signature": "s"})
            if self.likely(0.1):
                answer.append({"type": "redacted_thinking", "data": "AA"})
            answer += [{"type": "text", "text": self.text()} for _ in range(self.draw.randrange(3))]
            calls = self.draw.randrange(3) if self.likely(0.4) else 0
            for _ in range(calls):
                given = self.draw.choice(({"b": 1, "a": "é"}, {}, {"x": [1, {"y": None}]}))
                answer.append({"type": "tool_use", "id": "t", "name": "f", "input": given})
            turns.append({"role": "assistant", "content": answer or "ok"})
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": self.content(),
                    "is_error": self.likely(0.2),
                }
                for _ in range(calls)
            ]
            if results:
                turns.append(
                    {"role": "user", "content": results + (self.parts() if self.likely(0.5) else [])}
                )
        if self.likely(0.8):
            turns.append({"role": "user", "content": self.content()})
        body: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": turns}
        if self.likely(0.7):
            blocks = [{"type": "text", "text": BILLED}] if self.likely(0.4) else []
            kept = {"cache_control": {"type": "ephemeral"}}
            body["system"] = self.draw.choice(
                (self.text(), [*blocks, *({**one, **kept} for one in self.parts())])
            )
        if self.likely(0.4):
            schemas = ({"type": "object", "properties": {}}, {"z": 1, "a": {"b": 2}})
            tool = {"name": "f", "input_schema": self.draw.choice(schemas)}
            tool |= {"description": self.text()} if self.likely(0.5) else {}
            tool |= {"strict": self.likely(0.5)} if self.likely(0.3) else {}
            body["tools"] = [dict(tool), {**tool, "name": "g", "defer_loading": True}]
            if self.likely(0.3):
                change = {"type": "tool_reference", "name": "g"}
                block = {"type": self.draw.choice(("tool_addition", "tool_removal")), "tool": change}
                turns.append({"role": "system", "content": [block]})
            if self.likely(0.5):
                body["tool_choice"] = {"type": self.draw.choice(("auto", "any", "none"))}
        if self.likely(0.3):
            body["output_config"] = {"effort": self.draw.choice(("low", "high"))}
        if self.likely(0.3):
            kinds = ({"type": "disabled"}, {"type": "adaptive"})
            body["thinking"] = self.draw.choice(kinds)
        if self.likely(0.2):
            body["chat_template_kwargs"] = self.draw.choice(KWARGS)
        return body

    def parts(self) -> list[dict[str, Any]]:
        return [{"type": "text", "text": self.text()} for _ in range(self.draw.randrange(1, 3))]


@pytest.fixture(scope="module")
def vllms() -> Callable[[Mapping[str, Any], str], str]:
    """How vLLM renders a body with the tokenizer of a folder."""
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
        from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
        from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
        from vllm.renderers import hf
        from vllm.renderers.chat_utils import parse_chat_messages

    def text(body: Mapping[str, Any], folder: str) -> str:
        request: Any
        tokenizer = AutoTokenizer.from_pretrained(folder)
        given = json.loads(json.dumps(body))
        if "messages" in body:
            if "max_tokens" in body:
                template = tokenizer.get_chat_template(None, tools=None)
                request = AnthropicServingMessages.to_chat_completion_request(
                    AnthropicMessagesRequest.model_validate(given),
                    merge_inline_system=AnthropicServingMessages._detect_merge_inline_system(template),
                )
            else:
                request = ChatCompletionRequest.model_validate(given)
            messages = request.messages
            tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        else:
            request = ResponsesRequest.model_validate(given)
            messages = construct_input_messages(
                request_instructions=request.instructions, request_input=request.input
            )
            tools = construct_tool_dicts(request.tools, request.tool_choice)
        none = dict.fromkeys(("multimodal_config", "tokenizer_revision", "code_revision", "revision"))
        named = {"tokenizer": folder, "model": folder, "hf_config": SimpleNamespace(model_type="")}
        model: Any = SimpleNamespace(**none, **named, enable_prompt_embeds=False, trust_remote_code=False)
        form = hf.resolve_chat_template_content_format(None, tools, "auto", tokenizer, model_config=model)
        said, *_ = parse_chat_messages(messages, model, content_format=form)
        flags = request.build_chat_params(None, "auto").get_apply_chat_template_kwargs()
        return str(
            hf.safe_apply_chat_template(model, tokenizer, said, tools=tools, **{**flags, "tokenize": False})
        )

    return text


@pytest.mark.parametrize("family", first_of(list(TEMPLATES)))
def test_random_bodies_are_rendered_as_vllm_renders_them(
    vllms: Callable[[Mapping[str, Any], str], str], tmp_path: Path, family: str
) -> None:
    logging.disable(logging.CRITICAL)
    try:
        folder, bodies, equal = str(make_tokenizer(tmp_path / family, family)), Bodies(1), 0
        by = renderer(folder)
        for _ in range(BODIES):
            body = bodies.draw.choice((bodies.chat, bodies.items, bodies.messages))()
            try:
                theirs = vllms(body, folder)
            except Exception:  # the template refused it
                with pytest.raises(UsageError):
                    by.ids(body_of(body, MESSAGES if "max_tokens" in body else ""))
                continue
            api = MESSAGES if "max_tokens" in body else ""
            assert by.text(by.ids(body_of(body, api))) == theirs, body
            equal += 1
        assert equal > BODIES / 10
    finally:
        logging.disable(logging.NOTSET)
