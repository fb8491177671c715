"""Reads what an answer of the four APIs reports: token counts, hits, token ids. Pure; whatever is wrong is left out."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtune.base.bounded import Budget, decode_json, unpack
from kvtune.requests.log.requests_log import MOST_TOKENS
from kvtune.servers.tap.exchange import EVENTS as EVENTS

LIMITS = Budget(64 << 20, 256 << 20)
MARKS = (b'"usage"', b'token_ids"', b'"error"')
"""A stream's event is read only if it contains one of these."""


@dataclass(frozen=True, slots=True)
class Answer:
    """-1: the answer does not say. `prompts`: token ids of each prompt, if it has them; `answer`: of the first choice.

    `hit`: prompt tokens that the server reported as cached. `error`: the server's words.
    """

    prompt_tokens: int = -1
    output_tokens: int = -1
    hit: int = -1
    prompts: tuple[Sequence[int], ...] = ()
    answer: Sequence[int] = ()
    error: str = ""


def read_answer(content: bytes, kind: str, encoding: str = "", choices: int = 1) -> Answer:
    """Read an answer, or the end of one. `kind`, `encoding`: its content-type and content-encoding.

    `choices`: answers to each prompt, the request's `n`.
    """
    try:
        plain = unpack(content, encoding, LIMITS.text_bytes)
    except ValueError:
        plain = b""
    usage: Mapping[str, Any] = {}
    prompts: dict[int, list[int]] = {}
    answer: list[int] = []
    error = ""
    for part in _parts(plain, kind):
        inner = _object(part, "response") or _object(part, "message") or part
        counts = _object(inner, "usage") or _object(part, "usage")
        usage = {**usage, **{name: value for name, value in (counts or {}).items() if value is not None}}
        error = error or _error(part)
        _ids_of(inner, prompts, answer, choices)
    return Answer(*counts_of(usage), tuple(prompts[n] for n in sorted(prompts)), answer, error)


def _parts(plain: bytes, kind: str) -> Iterator[Mapping[str, Any]]:
    if not kind.lower().startswith(EVENTS):
        read = _json(plain)
        yield read if isinstance(read, dict) else {}
        return
    for line in io.BytesIO(plain):
        if line.startswith(b"data:") and any(word in line for word in MARKS):
            read = _json(line[5:])
            if isinstance(read, dict):
                yield read


def _json(text: bytes) -> object:
    try:
        return decode_json(text, LIMITS)
    except ValueError:
        return None


def _object(row: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    value = row.get(name)
    return value if isinstance(value, dict) else None


def _error(row: Mapping[str, Any]) -> str:
    error = row.get("error") or (row.get("message") if row.get("object") == "error" else None)
    message = error.get("message") if isinstance(error, dict) else error
    return message[:300] if isinstance(message, str) else ""


def _count(row: Mapping[str, Any], *names: str) -> int:
    values = (row.get(name) for name in names)
    return next((v for v in values if type(v) is int and 0 <= v <= MOST_TOKENS), -1)


def counts_of(usage: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return prompt tokens, output tokens and hits. Anthropic's input tokens leave out what the cache has or takes."""
    prompt, output = (
        _count(usage, "prompt_tokens", "input_tokens"),
        _count(usage, "completion_tokens", "output_tokens"),
    )
    details = _object(usage, "prompt_tokens_details") or _object(usage, "input_tokens_details") or {}
    hit = _count(details, "cached_tokens")
    read = _count(usage, "cache_read_input_tokens")
    if read >= 0 and prompt >= 0:
        return prompt + read + max(0, _count(usage, "cache_creation_input_tokens")), output, read
    return prompt, output, hit


def _ids_of(row: Mapping[str, Any], prompts: dict[int, list[int]], answer: list[int], each: int) -> None:
    """Collect token ids, which are there if the request has `return_token_ids`."""
    if whole := _ids(row.get("prompt_token_ids")):
        prompts[0] = whole
    choices = row.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if not isinstance(choice, dict):
            continue
        number = max(0, _count(choice, "index"))
        if ids := _ids(choice.get("prompt_token_ids")):
            prompts.setdefault(number // max(1, each), ids)
        if number == 0:
            answer += _ids(choice.get("token_ids"))


def _ids(value: object) -> list[int]:
    if not isinstance(value, list) or len(value) > MOST_TOKENS:
        return []
    whole = value and set(map(type, value)) == {int} and min(value) >= 0 and max(value) < 1 << 32
    return value if whole else []
