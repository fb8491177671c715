"""The process that renders with vLLM's own renderer: `python -m kvtune.lab.engine.render_child`. No engine, no weights.

It needs the model's config.json and tokenizer. Whatever it imports of vLLM may have moved in another version: it then
ends with the reason, and the chat template renders (`kvtune/requests/log/rendering.py`).
"""

from __future__ import annotations

import asyncio
import datetime
import os
import warnings
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from kvtune.base.errors import UsageError, reason
from kvtune.requests.log.bodies import CHAT, COMPLETIONS, MESSAGES, Body, Rendered
from kvtune.requests.log.by_itself import DATED, ByItself, clock
from kvtune.requests.log.render_loop import serve

NAME = "model"
PINNED = "VLLM_SYSTEM_START_DATE"
"""vLLM's variable for the date that it writes into prompts of gpt-oss, in place of today's."""
USED = {
    "VllmConfig": "config",
    "AsyncEngineArgs": "engine.arg_utils",
    "AnthropicMessagesRequest": "entrypoints.anthropic.protocol",
    "AnthropicServingMessages": "entrypoints.anthropic.serving",
    "ChatCompletionRequest": "entrypoints.openai.chat_completion.protocol",
    "CompletionRequest": "entrypoints.openai.completion.protocol",
    "BaseModelPath": "entrypoints.openai.models.protocol",
    "OpenAIModelRegistry": "entrypoints.openai.models.serving",
    "ResponsesRequest": "entrypoints.openai.responses.protocol",
    "ServingRender": "entrypoints.scale_out.render.serving",
    "renderer_from_config": "renderers",
    "OnlineRenderer": "renderers.online_renderer",
    "__version__": "version",
}
"""Names of vLLM -> the module that has them."""
TOOL_PARSERS = {"mistral": "mistral", "gpt_oss": "openai"}
"""Kinds of renderers -> a tool parser that they take. It changes no prompt, but vLLM wants one for tools."""


def main() -> None:
    warnings.simplefilter("ignore")
    used = {name: getattr(import_module(f"vllm.{module}"), name) for name, module in USED.items()}
    serve(lambda name: OfVllm(name, SimpleNamespace(**used)))  # the process's limits begin here


class OfVllm:
    """vLLM's renderer of a model. UsageError if vLLM cannot load it."""

    def __init__(self, name: str, vllm: SimpleNamespace) -> None:
        self.name = name
        self._vllm = vllm
        self._loop = asyncio.new_event_loop()
        try:
            self._load()
        except Exception as error:  # vLLM and pydantic raise many kinds
            raise UsageError(f"vLLM's renderer does not load {name}: {_reason(error)}", "") from error
        self.how = f"the renderer of vLLM {vllm.__version__}"
        self._pinned = os.environ.get(PINNED)

    def _load(self) -> None:
        vllm = self._vllm
        arguments = vllm.AsyncEngineArgs(model=self.name)
        model = arguments.create_model_config()
        model.quantization = None  # no kernel runs
        outputs = arguments.create_structured_outputs_config()
        config = vllm.VllmConfig(model_config=model, structured_outputs_config=outputs)
        renderer = vllm.renderer_from_config(config)
        self._harmony = model.hf_config.model_type == "gpt_oss"
        kind = "gpt_oss" if self._harmony else type(renderer).__name__.removesuffix("Renderer").lower()
        self._online = vllm.OnlineRenderer(
            model_config=model,
            renderer=renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser=TOOL_PARSERS.get(kind, "hermes"),
            reasoning_parser=config.structured_outputs_config.reasoning_parser,
        )
        paths = [vllm.BaseModelPath(name=NAME, model_path=self.name)]
        models = vllm.OpenAIModelRegistry(model_config=model, base_model_paths=paths)
        self._serving = vllm.ServingRender(models, self._online)
        self._tokenizer = renderer.get_tokenizer()
        template = "" if self._harmony or kind != "hf" else _template_of(self._tokenizer)
        merge = bool(self._serving._merge_inline_system)
        dated = "vLLM" if self._harmony else ""
        self._dated = DATED in template
        self._by_itself = ByItself(template, merge, self._text_of, dated)
        self._disabled = self._effort_if_disabled()

    def rendered(self, body: Body) -> Rendered:
        self._set_date(body.sent)
        ids = self._ids(body)
        notes = () if body.api == COMPLETIONS else self._by_itself.notes(body)
        return Rendered(ids, self.how, notes)

    def text(self, ids: Sequence[int]) -> str:
        if self._harmony:
            from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

            return str(get_encoding().decode(list(ids)))
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _ids(self, body: Body) -> Sequence[int]:
        try:
            answer = self._loop.run_until_complete(self._answer(body))
        except Exception as error:
            raise _refused(_reason(error)) from error
        if isinstance(answer, list):
            if len(answer) != 1:
                raise UsageError("has several prompts", "write a line for each of them")
            answer = answer[0]
        if getattr(answer, "token_ids", None) is None:
            raise _refused(reason(ValueError(answer.error.message)))
        ids: Sequence[int] = answer.token_ids
        return ids

    async def _answer(self, body: Body) -> Any:
        vllm, serving = self._vllm, self._serving
        fields = {**body.fields, "model": NAME}
        if body.api == CHAT:
            return await serving.render_chat_request(vllm.ChatCompletionRequest(**fields))
        if body.api == COMPLETIONS:
            return await serving.render_completion_request(vllm.CompletionRequest(**fields))
        if body.api == MESSAGES:
            asked = vllm.AnthropicMessagesRequest(**{"max_tokens": 1, **fields})
            convert = vllm.AnthropicServingMessages.to_chat_completion_request
            merge = serving._merge_inline_system
            chat = convert(asked, merge_inline_system=merge, disabled_thinking_effort=self._disabled)
            return await serving.render_chat_request(chat)
        return await serving.render_responses_request(vllm.ResponsesRequest(**fields))

    def _effort_if_disabled(self) -> Any:
        """Return the effort that the server's handler of /v1/messages finds; ServingRender takes "none" before 0.33."""
        resolver = getattr(self._serving, "_disabled_thinking_effort_resolver", None)
        if resolver is not None:
            asked = {"model": NAME, "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
            disabled = self._vllm.AnthropicMessagesRequest(**asked, thinking={"type": "disabled"})
            return self._loop.run_until_complete(resolver.resolve_for(disabled))
        kind = self._vllm.AnthropicServingMessages
        handler = kind.__new__(kind)
        handler.online_renderer, handler.model_config = self._online, self._online.model_config
        return self._loop.run_until_complete(handler._probe_disabled_thinking_effort())

    def _text_of(self, messages: list[dict[str, Any]]) -> str:
        return self.text(self._ids(Body(CHAT, {"messages": messages})))

    def _set_date(self, sent: float | None) -> None:
        """Render as on the day on which the request was sent: vLLM, or the template, writes the date."""
        if self._harmony and not self._pinned and sent is not None:
            os.environ[PINNED] = datetime.datetime.fromtimestamp(sent).strftime("%Y-%m-%d")
        elif self._harmony and not self._pinned:
            os.environ.pop(PINNED, None)
        if self._dated:
            self._online.default_chat_template_kwargs = {} if sent is None else {DATED: clock(sent)}


def _template_of(tokenizer: Any) -> str:
    try:
        return str(tokenizer.get_chat_template(None, tools=None))
    except (AttributeError, ValueError):
        return ""


def _refused(why: str) -> UsageError:
    return UsageError(f"is refused by vLLM: {why}", "the server would refuse it, too: leave it out")


def _reason(error: BaseException) -> str:
    """Return pydantic's first reason with its place, or the error's first line."""
    errors = getattr(error, "errors", None)
    if callable(errors):
        first = errors()[0]
        return reason(ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}"))
    return reason(ValueError((str(error).strip().splitlines() or [type(error).__name__])[0]))


if __name__ == "__main__":
    main()
