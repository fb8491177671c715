"""The body of a request, the API that it was sent to, and what may stand in it. Pure.

Every body goes through `body_of` before it is rendered: a field that no list below has is a UsageError that names it.
vLLM leaves unknown fields out without a word; another server, or a later version, need not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvtune.base.errors import UsageError

CHAT, COMPLETIONS, RESPONSES, MESSAGES = (
    *("/v1/chat/completions", "/v1/completions"),
    *("/v1/responses", "/v1/messages"),
)
APIS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
SHORT = dict(zip(APIS, ("chat", "completions", "responses", "messages"), strict=True))

LOG_IDS = 'log token ids for such requests: "return_token_ids": true'
NAME_API = 'if its API is another, name it in the line: "url": "/v1/chat/completions"'


def names_in(words: str) -> frozenset[str]:
    return frozenset(words.split())


SAMPLING = names_in(
    "frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens max_output_tokens n best_of "
    "presence_penalty response_format text seed stop stop_sequences stop_token_ids temperature top_p top_k min_p "
    "repetition_penalty length_penalty thinking_token_budget use_beam_search include_stop_str_in_output ignore_eos "
    "min_tokens allowed_token_ids bad_words structured_outputs repetition_detection watermarking logprob_token_ids "
    "prompt_logprobs guided_json guided_regex guided_choice guided_grammar guided_decoding_backend "
    "max_tool_calls parallel_tool_calls tool_choice prediction verbosity"
)
"""What the model makes of a prompt. `tool_choice` and formats are in no chat template's variables."""
ANSWERING = names_in(
    "stream stream_options stream_interval echo include include_reasoning skip_special_tokens "
    "spaces_between_special_tokens return_tokens_as_token_ids return_token_ids return_token_offsets "
    "return_prompt_text routed_experts_prompt_start mm_payload return_mm_kwargs enable_response_messages "
    "background store"
)
"""What is sent back, and how."""
OTHERS = names_in(
    "model user metadata priority request_id session_id cache_salt ec_transfer_params vllm_xargs truncation_side "
    "service_tier safety_identifier prompt_cache_key prompt_cache_retention speed inference_geo betas anthropic_beta "
    "anthropic_version context_management cache_control mm_processor_kwargs media_io_kwargs"
)
"""Who asks, and what the server does with it. vLLM ignores Anthropic's `context_management` and `cache_control`.

Images, which `mm_processor_kwargs` and `media_io_kwargs` are about, are refused where they are not rendered.
"""
UNSEEN = SAMPLING | ANSWERING | OTHERS
"""Fields that do not change the prompt."""

READ: Mapping[str, frozenset[str]] = {
    CHAT: names_in(
        "messages tools reasoning_effort documents chat_template_kwargs add_generation_prompt "
        "continue_final_message add_special_tokens"
    ),
    COMPLETIONS: frozenset(("prompt", "add_special_tokens")),
    RESPONSES: frozenset(("input", "instructions", "tools", "reasoning", "chat_template_kwargs")),
    MESSAGES: frozenset(("messages", "system", "tools", "thinking", "output_config", "chat_template_kwargs")),
}
"""Fields that are rendered."""
ELSEWHERE = {
    "chat_template": "has a chat template in the request",
    "truncate_prompt_tokens": "is truncated by the server",
    "truncation": "is truncated by the server",
    "previous_response_id": "goes on from a response that the server keeps",
    "previous_input_messages": "goes on from messages that the server had",
    "conversation": "goes on from a conversation that the server keeps",
    "prompt": "has a prompt that the server keeps",
    "suffix": "has text to fill in between",
    "prompt_embeds": "has embeddings in place of text",
    "kv_transfer_params": "has its prompt from another server",
    "functions": "has functions in a form that vLLM does not read",
    "function_call": "has functions in a form that vLLM does not read",
    "mcp_servers": "has tools of other servers",
    "container": "has files that the server keeps",
}
"""Fields that change a prompt, of which only the server knows how -> what they do, in words for a message."""
NOTHING = {"truncation": ("disabled",), "function_call": ("none", "auto")}
"""Values of these with which they do nothing."""

LONGEST_NOTE = 64
"""The longest text of an unknown field that is the log's, in a line that is not divided into log and body."""
OWN = names_in(
    "name id custom_id kind class hit usage response output answer token_ids choices prompt_token_ids url path "
    "endpoint api method status status_code object created ttft ttft_s ttft_ms session client replica "
    "headers error tags replica by broken_off_by"
)
"""Fields of a line that are the log's."""

OF_MESSAGES = ("system", "stop_sequences", "thinking", "output_config", "anthropic_version", "anthropic_beta")
"""Fields that only /v1/messages has."""
BLOCKS = (
    "tool_use",
    "tool_result",
    "redacted_thinking",
    "image",
    "document",
    "search_result",
    "server_tool_use",
)
"""Types of parts that only /v1/messages has."""


class Body(NamedTuple):
    """A request's body, every field of which is known. `api`: one of `APIS`. `sent`: when, in seconds since 1970."""

    api: str
    fields: Mapping[str, Any]
    sent: float | None = None

    @property
    def is_chat(self) -> bool:
        return self.api != COMPLETIONS


class Note(NamedTuple):
    """What the server did to a prompt by itself. `kind`: one of `NOTES`; `where`: in words, such as "messages[3]"."""

    kind: str
    where: str


DATE, REMINDER, DEFAULT_SYSTEM, REASONING = NOTES = (
    "server_date",
    "reminder",
    "default_system",
    "reasoning_flag",
)
"""The server writes today's date into the prompt; moves a system message in front of the history; writes a system
prompt where the request has none; writes how much the model is to think."""


class Rendered(NamedTuple):
    """A prompt as the server renders it. `how`: what rendered it, in words for an answer."""

    ids: Sequence[int]
    how: str
    notes: tuple[Note, ...] = ()


def body_of(
    given: Mapping[str, Any] | Body, url: str = "", *, line: bool = False, sent: float | None = None
) -> Body:
    """Return the body with its API. `url`: where it was sent, if known. `line`: the log's fields stand beside its own.

    UsageError names a field of which it is not known whether it changes the prompt.
    """
    if isinstance(given, Body):
        return given
    fields = {name: value for name, value in given.items() if value is not None}
    if line:
        fields_read = (
            READ[CHAT] | READ[RESPONSES] | READ[MESSAGES] | READ[COMPLETIONS] | UNSEEN | set(ELSEWHERE)
        )
        fields = {n: v for n, v in fields.items() if n in fields_read or (n not in OWN and not _is_note(v))}
    path = url.partition("?")[0].rstrip("/")
    api = next(
        (api_path for api_path in APIS if path.endswith(api_path) or path == SHORT[api_path]), ""
    ) or _api(fields)
    for name, value in fields.items():
        if (
            name not in READ[api]
            and name not in UNSEEN
            and name not in ELSEWHERE
            and value not in ([], {}, "")
        ):
            raise _unknown(name, f"a body of {api}")
    return Body(api, fields, sent)


def refuse_elsewhere(body: Body) -> None:
    """Raise UsageError for a field that changes the prompt and that only the server can render."""
    for name, value in body.fields.items():
        what = ELSEWHERE.get(name)
        if name in READ[body.api] or what is None or value in ([], {}, "") or value in NOTHING.get(name, ()):
            continue
        if name == "kv_transfer_params" and isinstance(value, dict) and not value.get("prompt_token_ids"):
            continue
        raise UsageError(f"{what} ({name})", LOG_IDS)


def known_only(given: Mapping[str, Any], allowed: Collection[str], where: str) -> None:
    """Raise UsageError for a field of a message, a part or a tool that no list has, and that is not empty."""
    for name, value in given.items():
        if name not in allowed and value not in (None, [], {}, "", False):
            raise _unknown(name, where)


def shown(value: object) -> str:
    """Shorten a value of the log to 80 ASCII characters on one line, for a message."""
    return ascii(str(value))[1:-1][:80]


def _unknown(name: str, where: str) -> UsageError:
    return UsageError(
        f"has {shown(name)} in {where}, and what it does to the prompt is not known",
        f"leave it out if the server ignores it; else {LOG_IDS}",
    )


def _is_note(value: object) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and len(value) <= LONGEST_NOTE)


def _api(fields: Mapping[str, Any]) -> str:
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return RESPONSES if isinstance(fields.get("input"), (str, list)) else COMPLETIONS
    choice, tools = fields.get("tool_choice"), _objects(fields.get("tools"))
    if (
        any(name in fields for name in OF_MESSAGES)
        or any("name" in tool and "function" not in tool for tool in tools)
        or (isinstance(choice, dict) and choice.get("type") in ("auto", "any", "tool", "none"))
        or any(
            part.get("type") in BLOCKS or "signature" in part
            for message in _objects(messages)
            for part in _objects(message.get("content"))
        )
    ):
        return MESSAGES
    return CHAT


def _objects(given: object) -> Iterable[dict[str, Any]]:
    return (message for message in given if isinstance(message, dict)) if isinstance(given, list) else ()
