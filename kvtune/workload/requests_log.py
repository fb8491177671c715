"""Reads a log of requests, one JSON object a line: token ids, or bodies of an API of OpenAI's or Anthropic's.

In: the file, and a function that turns a body with text into token ids. Out: `Logged` in the file's order.
docs/requests-log.md lists what a line may hold. Every error names the file and the line. No text is kept.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtune.errors import KvtuneError, UsageError
from kvtune.workload.bodies import COMPLETIONS, Body, body_of
from kvtune.workload.trace_file import opened

LONGEST_LINE = 64 << 20
MOST_TOKENS = 16 << 20
"""Most tokens of one prompt."""
BEGUN = ("t0", "start", "start_time", "sent_at", "request_time", "timestamp", "ts", "created_at", "time")
ENDED = ("t1", "end", "end_time", "finished_at", "response_time")
MILLISECONDS = 1e11
"""A time above this is in milliseconds: in seconds it would be the year 5138."""

NO_CLASS = "log"
"""The class of a request whose line names none."""
NO_NAME = r"line-\d+"
"""The names of requests whose lines name none."""
LONGEST_CLASS = 60

Tokenize = Callable[[Body], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Logged:
    """One request. `t0`, `t1`: when it was sent and answered, in seconds since 1970; None if the log does not say.

    `ttft`: seconds from sending until the first token; None if the log does not say.
    `hit`: prompt tokens that the server reported as cached; -1 if the log does not say. `salt`: vLLM's `cache_salt`;
    requests with different salts share no cache. `kind`: the client's own class of the request; "" if it names none.
    `session`: the session id that the server saw; "" if the log does not say.
    `replica`: the name of the engine that served it; "" if the log does not say.
    """

    line: int
    name: str
    prompt: Sequence[int]
    answer: Sequence[int]
    output_tokens: int
    t0: float | None = None
    t1: float | None = None
    hit: int = -1
    salt: str = ""
    ttft: float | None = None
    kind: str = ""
    session: str = ""
    replica: str = ""

    @property
    def cached_at(self) -> float | None:
        """When its prompt was computed: with the first token, or at the latest with the last; None: not known."""
        return self.t0 + self.ttft if self.t0 is not None and self.ttft is not None else self.t1


def read_log(path: Path, tokenize: Tokenize | None = None) -> Iterator[Logged]:
    """Yield the requests of a log. Without `tokenize`, a line that has text and no token ids is a UsageError."""
    with opened(path, "log") as stream:
        number = 0
        while line := stream.readline(LONGEST_LINE):
            number += 1
            if len(line) == LONGEST_LINE:
                raise _bad(path, number, f"is longer than {LONGEST_LINE >> 20} MiB")
            if line.strip():
                yield _logged(path, number, line, tokenize)


def _logged(path: Path, number: int, line: str, tokenize: Tokenize | None) -> Logged:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise _bad(
            path, number, "is not JSON; a torn last line is one that was still being written"
        ) from None
    if not isinstance(row, dict):
        raise _bad(path, number, "is not a JSON object")
    body = _first(row, "body", "request", "params") or row
    body = body.get("body", body) if isinstance(body.get("body"), dict) else body
    response = _first(row, "response", "output") or {}
    response = response.get("body", response) if isinstance(response.get("body"), dict) else response
    choices = response.get("choices") or row.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    usage = _first(response, "usage") or _first(row, "usage") or {}
    answer = _ids(row.get("answer")) or _ids(row.get("token_ids")) or _ids(choice.get("token_ids")) or []
    prompt = (
        _ids(row.get("prompt_token_ids"))
        or _ids(response.get("prompt_token_ids"))
        or _ids(choice.get("prompt_token_ids"))
        or _ids(body.get("prompt_token_ids"))
        or _ids(body.get("prompt"))
    )
    if prompt is None:
        prompt = _from_text(path, number, row, body, tokenize)
        if tokenize is not None and not answer:
            counted = _counted(usage.get("completion_tokens"), usage.get("output_tokens"))
            with _named(path, number):
                answer = _answered(_text(choice, response), counted, tokenize)
    if not prompt:
        raise _bad(path, number, "has an empty prompt")
    details = _first(usage, "prompt_tokens_details", "input_tokens_details") or {}
    hit = _counted(row.get("hit"), details.get("cached_tokens"), usage.get("cache_read_input_tokens"))
    most = (body.get(name) for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"))
    output = _counted(usage.get("completion_tokens"), usage.get("output_tokens"), *most)
    name = next((v for v in (row.get("name"), row.get("custom_id"), row.get("id")) if isinstance(v, str)), "")
    return Logged(
        number,
        name or f"line-{number}",
        prompt,
        answer,
        len(answer) or max(0, output),
        _time(row, BEGUN),
        _time(row, ENDED),
        hit,
        str(body.get("cache_salt") or ""),
        _seconds(row),
        next((v[:LONGEST_CLASS] for v in (row.get("kind"), row.get("class")) if isinstance(v, str)), ""),
        next((v for v in (body.get("session_id"), row.get("session_id")) if isinstance(v, str)), ""),
        _replica(path, number, row.get("replica")),
    )


def _replica(path: Path, number: int, value: object) -> str:
    """Return the name of the engine that served a request: a text, or a number as text."""
    if value is None:
        return ""
    if (type(value) is int and 0 <= value < MOST_TOKENS) or (isinstance(value, str) and value):
        return str(value)[:LONGEST_CLASS]
    raise _bad(path, number, "has a `replica` that is neither a name nor a number from 0")


def _from_text(
    path: Path, number: int, row: Mapping[str, Any], given: Mapping[str, Any], tokenize: Tokenize | None
) -> Sequence[int]:
    url = next(
        (row[name] for name in ("url", "path", "endpoint", "api") if isinstance(row.get(name), str)), ""
    )
    with _named(path, number):
        body = body_of(given, url, line=given is row)
    prompt = body.fields.get("prompt")
    if body.api == COMPLETIONS:
        if isinstance(prompt, list) and len(prompt) > 1:
            raise _bad(path, number, "has several prompts, or a prompt that is no list of token ids")
        if not isinstance(prompt[0] if isinstance(prompt, list) and prompt else prompt, str):
            raise _bad(path, number, "has neither token ids nor `messages`, `input` or a `prompt`")
    if tokenize is None:
        raise UsageError(
            f"{path}, line {number} has text, and no token ids",
            "name what renders it: requests:path=..,tokenizer=FOLDER (tokenizer=bytes compares bytes), or log "
            'requests with "return_token_ids": true',
        )
    with _named(path, number):
        return tokenize(body)


@contextlib.contextmanager
def _named(path: Path, number: int) -> Iterator[None]:
    """Name the line in errors about its body."""
    try:
        yield
    except KvtuneError as error:
        kind = UsageError if isinstance(error, UsageError) else KvtuneError
        raise kind(f"{path}, line {number} {error.message}", error.hint) from error


def _answered(text: str, counted: int, tokenize: Tokenize) -> Sequence[int]:
    """Return the tokens of an answer's text, and one more for the end token if the server counted that.

    Empty if the server's count differs in any other way: the text then lacks tokens, such as those of reasoning.
    """
    try:
        ids = (
            tokenize(Body(COMPLETIONS, {"prompt": text, "add_special_tokens": False}))
            if text and counted > 0
            else ()
        )
    except UsageError:
        return ()
    if not ids or counted - len(ids) not in (0, 1):
        return ()
    end = [ids[-1]] * (counted - len(ids))  # the end token is sampled but never computed: any id will do
    return array("I", [*ids, *end])


def _text(choice: Mapping[str, Any], response: Mapping[str, Any]) -> str:
    """Return the text of a response of any of the APIs; empty if the response holds more than text."""
    message, items, blocks = choice.get("message"), response.get("output"), response.get("content")
    if isinstance(message, dict):
        more = ("tool_calls", "reasoning", "reasoning_content")
        text = None if any(message.get(name) for name in more) else message.get("content")
    elif isinstance(items, list) and len(items) == 1 and isinstance(items[0], dict):
        parts = items[0].get("content") if items[0].get("type") == "message" else None
        part = parts[0] if isinstance(parts, list) and len(parts) == 1 else None
        text = part.get("text") if isinstance(part, dict) else None
    elif isinstance(blocks, list):
        block = blocks[0] if len(blocks) == 1 and isinstance(blocks[0], dict) else {}
        text = block.get("text") if block.get("type") == "text" else None
    else:
        text = choice.get("text")
    return text if isinstance(text, str) else ""


def _first(row: Mapping[str, Any], *names: str) -> dict[str, Any] | None:
    return next((row[name] for name in names if isinstance(row.get(name), dict)), None)


def _counted(*values: object) -> int:
    """Return the first of these values that is a count; -1 if there is no count."""
    return next((value for value in values if type(value) is int and 0 <= value <= MOST_TOKENS), -1)


def _ids(value: object) -> Sequence[int] | None:
    """Return the value as token ids; None if it is something else, such as text."""
    if not isinstance(value, list) or not value or len(value) > MOST_TOKENS:
        return None
    return array("I", value) if all(type(one) is int and 0 <= one < 1 << 32 for one in value) else None


def _time(row: Mapping[str, Any], names: Sequence[str]) -> float | None:
    for name in names:
        value = row.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e15:
            return value / 1000.0 if value > MILLISECONDS else float(value)
        if isinstance(value, str):
            try:
                read = datetime.datetime.fromisoformat(value)
            except ValueError:
                continue
            return read.timestamp() if read.tzinfo else read.replace(tzinfo=datetime.UTC).timestamp()
    return None


def _seconds(row: Mapping[str, Any]) -> float | None:
    """Return the time until the first token, in seconds."""
    for name, unit in (("ttft", 1.0), ("ttft_s", 1.0), ("ttft_ms", 1e-3)):
        value = row.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e9:
            return value * unit
    return None


def _bad(path: Path, number: int, what: str) -> UsageError:
    return UsageError(
        f"{path}, line {number} {what}", "each line is one request; docs/requests-log.md shows them"
    )
