"""Renders a request's body by a tokenizer of transformers and its chat template, as vLLM does.

Runs in the process of `render_child.py`. Nothing is fetched from a network, and no code from a model's folder is run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from kvtune.base.errors import UsageError
from kvtune.base.files import read_json
from kvtune.requests.log.bodies import COMPLETIONS, LOG_IDS, MESSAGES, Body, Rendered, body_of, shown
from kvtune.requests.log.by_itself import DATED, ByItself, clock
from kvtune.requests.log.conversation import Conversation, Message, Server, conversation
from kvtune.requests.log.rendering import NO_TOKENIZER, prompt_of

MOST_CONFIG_BYTES = 16 << 20
OWN_RENDERER = (
    *("gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "inkling_text"),
    *("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"),
    *("DeepseekV41ForCausalLM", "KimiK3ForConditionalGeneration"),
    *("InklingForCausalLM", "InklingForConditionalGeneration"),
)
"""Model types and architectures whose chats vLLM renders with built-in code, not with a chat template."""
EFFORTS = ("low", "medium", "high", "xhigh", "max")
PASSED = ("add_generation_prompt", "continue_final_message", "documents")
"""Parameters of transformers' `apply_chat_template` that it passes on to the template."""


class Templates:
    """Renders with a tokenizer of transformers and its chat template."""

    def __init__(self, tokenizer: str) -> None:
        self.name = tokenizer
        self._tokenizer = _loaded(tokenizer)
        self._backend = _backend(self._tokenizer)
        self._own = _own_renderer(tokenizer)
        self._reserved = _parameters(self._tokenizer.apply_chat_template) - set(PASSED)

    how = "the chat template, without vLLM"

    def rendered(self, body: Body) -> Rendered:
        return Rendered(
            self._ids(body), self.how, () if body.api == COMPLETIONS else self._by_itself.notes(body)
        )

    @cached_property
    def _by_itself(self) -> ByItself:
        return ByItself(self._template(None), self._server.merge, self._text_of)

    def _text_of(self, messages: list[Message]) -> str:
        return self._rendered(conversation(body_of({"messages": messages})))

    def _ids(self, body: Body) -> Sequence[int]:
        prompt = prompt_of(body)
        special = body.fields.get("add_special_tokens", prompt is not None)
        text = self._chat(body) if prompt is None else prompt
        try:
            if self._backend is not None:
                encoded = self._backend.encode_batch_fast([text], add_special_tokens=bool(special))
                return array("I", encoded[0].ids)
            return array("I", self._tokenizer(text, add_special_tokens=bool(special))["input_ids"])
        except (TypeError, ValueError) as error:  # e.g. half a surrogate pair in the text
            raise UsageError(f"cannot be tokenized: {_reason(error)}", "repair its text") from error

    def text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def _chat(self, body: Body) -> str:
        if self._own:
            raise UsageError(f"is a chat, and vLLM renders chats of {self.name} by built-in code", LOG_IDS)
        messages = conversation(body, self._server) if body.api == MESSAGES else conversation(body)
        if body.sent is not None and DATED in self._template(messages.tools):
            messages.flags[DATED] = clock(body.sent)
        return self._rendered(messages)

    @cached_property
    def _server(self) -> Server:
        """What vLLM's server finds out about this template before it converts a body of /v1/messages."""
        return Server(any(map(self._merges, (None, []))), self._effort_if_disabled())

    def _merges(self, tools: list[Any] | None) -> bool:
        """Whether the template refuses a system message between others: vLLM then moves each into the first."""
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        bare = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        turns = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
        try:
            bare.from_string(self._template(tools)).render(messages=turns, add_generation_prompt=False)
        except TemplateError:
            return True
        return False

    def _effort_if_disabled(self) -> str:
        """Return the effort that stands for disabled thinking: "low" if the template refuses or ignores "none"."""

        def prompt(effort: str) -> str | None:
            asked = {"messages": [{"role": "user", "content": "Hi"}], "reasoning_effort": effort}
            try:
                return self._rendered(conversation(body_of(asked)))
            except UsageError:
                return None

        none = prompt("none")
        return "low" if none is None or any(prompt(effort) == none for effort in EFFORTS) else "none"

    def _rendered(self, messages: Conversation) -> str:
        if taken := {name for name in messages.flags if name in self._reserved}:
            raise UsageError(f"has {min(taken)} in chat_template_kwargs", LOG_IDS)
        template = self._template(messages.tools)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    _for_template(messages.messages, template),
                    tools=messages.tools,
                    chat_template=template,
                    tokenize=False,
                    **messages.flags,
                )
            )
        except Exception as error:  # a template may raise anything, and refuses a conversation that way
            raise UsageError(
                f"is refused by the chat template of {self.name}: {_reason(error)}",
                "the server would refuse it, too: leave it out",
            ) from error

    def _template(self, tools: list[Any] | None) -> str:
        try:
            return str(self._tokenizer.get_chat_template(None, tools=tools))
        except ValueError:
            raise UsageError(
                f"is a chat, and {self.name} has no chat template",
                "name a tokenizer that has one with tokenizer=FOLDER; tokenizer=bytes needs none",
            ) from None


def _for_template(messages: list[Message], template: str) -> list[Message]:
    """Shape messages for the template: contents as text or parts; `developer` as `system` if it lacks that role."""
    parts = _reads_parts(template)
    shaped = [{**message, "content": _content(message, parts)} for message in messages]
    if "'developer'" in template or '"developer"' in template:
        return shaped
    if all(message["role"] != "developer" for message in shaped):
        return shaped
    for message in shaped:
        if message["role"] == "developer":
            message["role"] = "system"
            message.pop("tools", None)
    if all(message["role"] != "system" for message in shaped[1:]):
        return shaped
    system_texts = [_joined(message["content"]) for message in shaped if message["role"] == "system"]
    system_message = {"role": "system", "content": "\n\n".join(text for text in system_texts if text)}
    return [system_message, *(message for message in shaped if message["role"] != "system")]


def _content(message: Message, parts: bool) -> str | list[dict[str, str]]:
    content: list[dict[str, str]] = message["content"]
    if not parts:
        return _joined([part for part in content if part["text"]])
    return _joined(content) if message["role"] == "tool" else content


def _joined(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


@lru_cache(maxsize=32)
def _reads_parts(template: str) -> bool:
    """Whether a template loops over the parts of a message's content."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    waiting = [_compile_jinja_template(template).environment.parse(template)]
    while waiting:
        node = waiting.pop()
        if _kind(node) == "For" and _is_content(node.iter):
            return True
        waiting.extend(node.iter_child_nodes())
    return False


def _is_content(node: Any) -> bool:
    """Whether an expression is a message's content, possibly filtered or sliced."""
    while _kind(node) in ("Filter", "Test") or (_kind(node) == "Getitem" and _kind(node.arg) == "Slice"):
        node = node.node
    if _kind(node) == "Getitem":
        return _kind(node.arg) == "Const" and bool(node.arg.value == "content")
    return "content" in (getattr(node, "attr", ""), getattr(node, "name", ""))


def _kind(node: object) -> str:
    return type(node).__name__


def _loaded(tokenizer: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UsageError(
            "transformers, which renders text, is not installed",
            "it comes with vLLM: pip install transformers; tokenizer=bytes compares bytes of the text without it",
        ) from None
    folder = Path(tokenizer).expanduser()
    try:
        loaded = AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else tokenizer, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # transformers raises many kinds
        if "trust_remote_code" in str(error):  # e.g. Kimi K2 and K3
            raise UsageError(
                f"{tokenizer} has a tokenizer that is code in the model's repository, which is not run",
                f"{LOG_IDS}; {NO_TOKENIZER}",
            ) from error
        why = f": {_reason(error)}" if folder.is_dir() else " on this machine"
        raise UsageError(f"{tokenizer} has no tokenizer{why}", NO_TOKENIZER) from error
    loaded.model_max_length = 1 << 60  # the engine says which prompts are too long
    return loaded


def _backend(tokenizer: Any) -> Any:
    """Return what makes a tokenizer's ids, which needs no place of each token then; None if its class does more."""
    from transformers import PreTrainedTokenizerFast

    own = ("__call__", "_encode_plus", "_batch_encode_plus")
    plain = all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in own
    )
    backend = getattr(tokenizer, "backend_tokenizer", None) if plain else None
    if not hasattr(backend, "encode_batch_fast"):
        return None
    tokenizer("")  # without truncation and padding, from now on
    return backend


def _own_renderer(tokenizer: str) -> bool:
    from transformers.utils import cached_file

    def found(name: str) -> Any:
        folder = Path(tokenizer).expanduser()
        path = str(folder) if folder.is_dir() else tokenizer
        return cached_file(
            path,
            name,
            local_files_only=True,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )

    if found("tekken.json"):
        return True  # a Mistral tokenizer, which vLLM renders with mistral_common
    try:
        config = read_json(Path(found("config.json") or ""), MOST_CONFIG_BYTES)
        return any(
            name in OWN_RENDERER for name in (config.get("model_type"), *(config.get("architectures") or ()))
        )
    except (OSError, ValueError, AttributeError, TypeError):
        return False


def _parameters(function: Any) -> set[str]:
    import inspect

    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return {p.name for p in inspect.signature(function).parameters.values() if p.kind not in kinds}


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return shown(lines[0]) if lines else type(error).__name__
