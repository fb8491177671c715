"""Reads a log of requests, one JSON object a line: token ids, or bodies of an API of OpenAI's or Anthropic's.

In: the file, and a function that turns a body with text into token ids. Out: `Logged` in the file's order.
docs/logs.md lists what a line may hold. Every error names the file and the line. No text is kept.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

from kvtune.base.bounded import BeyondError, Budget, decode_json
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.requests.log.bodies import COMPLETIONS, Body, Note, Rendered, body_of
from kvtune.requests.log.logged import Logged
from kvtune.requests.log.opened import opened

SHOWN = "docs/logs.md shows what a line may hold"
OWN = '{"by": "kvtune tap", '
"""How a line of kvtune's own log begins."""
LONGEST_LINE = 64 << 20
LIMITS = Budget(LONGEST_LINE, 2 << 30)
MOST_TOKENS = 16 << 20
"""Most tokens of one prompt."""
BEGUN = ("t0", "start", "start_time", "sent_at", "request_time", "timestamp", "ts", "created_at", "time")
ENDED = ("t1", "end", "end_time", "finished_at", "response_time")
LAST_S = 1e12
MILLISECONDS = 1e11
"""A time above this is in milliseconds: in seconds it would be the year 5138."""

NO_CLASS = "log"
"""The class of a request whose line names none."""
NO_NAME = r"line-\d+"
"""The names of requests whose lines name none."""
LONGEST_CLASS = 60
LONGEST_URL = 300

Render = Callable[[Sequence[Body]], Iterator[Rendered | UsageError]]
BATCH, BATCH_BYTES = 64, 1 << 20
"""Lines that are rendered together: their number, and the characters after which no more are added."""


@dataclass(slots=True)
class _Line:
    """A line of a log. `asked`: the bodies of the prompt and of the answer's text that must be rendered.

    `error`: why the line cannot be read, raised when its turn comes.
    """

    number: int
    row: Mapping[str, Any] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    usage: Mapping[str, Any] = field(default_factory=dict)
    prompt: Sequence[int] | None = None
    answer: Sequence[int] = ()
    asked: list[Body] = field(default_factory=list)
    error: KvtuneError | None = None
    own: bool = False
    """Whether kvtune wrote it."""


def read_log(path: Path, render: Render | None = None) -> Iterator[Logged]:
    """Yield the requests of a log. Without `render`, a line that has text and no token ids is a UsageError.

    Of kvtune's own log a line that cannot be read is left out, and standard error says so: nobody can mend it. Of any
    other log it is a UsageError. Lines are rendered together, while the next ones are read.
    """
    left_out: list[KvtuneError] = []
    count = 0
    try:
        for row in _rows(path, render):
            if isinstance(row, KvtuneError):
                left_out.append(row)
            else:
                count += 1
                yield row
        if left_out and not count:
            raise left_out[0]
    finally:
        if left_out and count:
            what = "".join(character if character.isprintable() else "?" for character in left_out[0].message)
            more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
            print(f"kvtune: {what}{more}: left out", file=sys.stderr)


def _rows(path: Path, render: Render | None) -> Iterator[Logged | KvtuneError]:
    before: list[_Line] = []
    rendering: Iterator[Rendered | KvtuneError] = iter(())
    for lines in chain(_batches(path, render), [[]]):
        answers = list(rendering)
        gone = bool(answers) and not isinstance(
            answers[-1], (Rendered, UsageError)
        )  # the process that renders
        asked = [body for line in lines for body in line.asked]
        rendering = _rendered(asked, render) if render is not None and asked and not gone else iter(())
        yield from _done(path, before, answers)
        if gone:
            return
        before = lines


def _rendered(asked: Sequence[Body], render: Render) -> Iterator[Rendered | KvtuneError]:
    """Begin to render. Return an iterator of what is rendered, up to an error that ends it: a missing tokenizer."""
    try:
        rendering = render(asked)
    except KvtuneError as error:
        return iter([error])

    def answers() -> Iterator[Rendered | KvtuneError]:
        try:
            yield from rendering
        except KvtuneError as error:
            yield error

    return answers()


def _batches(path: Path, render: Render | None) -> Iterator[list[_Line]]:
    with opened(path, "log") as stream:
        number = size = 0
        lines: list[_Line] = []
        while text := stream.readline(LONGEST_LINE):
            number += 1
            if text.strip():
                lines.append(line := _read(path, number, text, render))
                size += len(text) if line.asked else 0
                if line.error is not None and not line.own:
                    break
            if len(lines) >= BATCH or size >= BATCH_BYTES:
                yield lines
                lines, size = [], 0
        yield lines


def refused(line: bytes) -> str:
    """Return why a line that has token ids would be refused; "" if it is read."""
    path = Path("log")
    try:
        _whole(path, _parsed(path, 1, line.decode(), None), ())
    except KvtuneError as error:
        return f"its line {error.message.partition(', line 1 ')[2] or error.message}"
    return ""


def _read(path: Path, number: int, text: str, render: Render | None) -> _Line:
    try:
        line = _parsed(path, number, text, render)
    except KvtuneError as error:
        line = _Line(number, error=error)
    line.own = text.startswith(OWN)
    return line


def _parsed(path: Path, number: int, text: str, render: Render | None) -> _Line:
    if len(text) == LONGEST_LINE:
        raise _bad(path, number, f"is longer than {LONGEST_LINE >> 20} MiB")
    try:
        row = decode_json(text, LIMITS)
    except BeyondError as error:
        raise _bad(path, number, f"is refused: {error}") from None
    except ValueError:
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
    with _named(path, number):
        answers = ((row, "answer"), (row, "token_ids"), (choice, "token_ids"))
        answer = next((ids for holder, name in answers if (ids := _ids_of(holder, name))), [])
        holders = (row, response, choice, body)
        ids = next((ids for holder in holders if (ids := _ids_of(holder, "prompt_token_ids"))), None)
        prompt = ids or _ids(body.get("prompt"))
    line = _Line(number, row, body, usage, prompt, answer)
    if prompt is None:
        line.asked.append(_body(path, line, render))
        answer_text = _text(choice, response)
        if answer_text and not answer and _output(usage) > 0:
            line.asked.append(Body(COMPLETIONS, {"prompt": answer_text, "add_special_tokens": False}))
    return line


def _body(path: Path, line: _Line, render: Render | None) -> Body:
    """Return the body of a line of text. UsageError if it cannot be rendered."""
    urls = (line.row.get(name) for name in ("url", "path", "endpoint", "api"))
    url = next((url_value for url_value in urls if isinstance(url_value, str)), "")
    with _named(path, line.number):
        body = body_of(line.body, url, line=line.body is line.row, sent=_time(line.row, BEGUN))
    prompt = body.fields.get("prompt")
    if body.api == COMPLETIONS:
        if isinstance(prompt, list) and len(prompt) > 1:
            raise _bad(path, line.number, "has several prompts, or a prompt that is no list of token ids")
        if not isinstance(prompt[0] if isinstance(prompt, list) and prompt else prompt, str):
            raise _bad(path, line.number, "has neither token ids nor `messages`, `input` or a `prompt`")
    if render is None:
        raise UsageError(
            f"{path}, line {line.number} has text, and no token ids",
            "name what renders it: requests:path=..,tokenizer=FOLDER (tokenizer=bytes compares bytes), or log "
            'requests with "return_token_ids": true',
        )
    return body


def _done(
    path: Path, lines: Sequence[_Line], answers: Sequence[Rendered | KvtuneError]
) -> Iterator[Logged | KvtuneError]:
    """Yield the requests of lines. `answers`: what was rendered for them, in order."""
    given = iter(answers)
    for line in lines:
        try:
            yield _whole(path, line, list(islice(given, len(line.asked))))
        except KvtuneError as error:
            if not line.own:
                raise
            yield error


def _whole(path: Path, line: _Line, rendered: Sequence[Rendered | KvtuneError]) -> Logged:
    if line.error is not None:
        raise line.error
    with _named(path, line.number):
        for number, result in enumerate(
            rendered
        ):  # an answer's text that is refused leaves its tokens unknown
            if isinstance(result, KvtuneError) and not (number and isinstance(result, UsageError)):
                raise result
        return _logged(path, line, rendered)


def _logged(path: Path, line: _Line, rendered: Sequence[Rendered | KvtuneError]) -> Logged:
    row, body, usage, prompt, answer = line.row, line.body, line.usage, line.prompt, line.answer
    reason = ""
    notes: tuple[Note, ...] = ()
    if rendered and isinstance(rendered[0], Rendered):
        prompt, reason, notes = rendered[0]
    if len(rendered) == 2 and isinstance(rendered[1], Rendered):
        answer = _answered(rendered[1].ids, _output(usage))
    if not prompt:
        raise _bad(path, line.number, "has an empty prompt")
    details = _first(usage, "prompt_tokens_details", "input_tokens_details") or {}
    hit = _counted((row, "hit"), (details, "cached_tokens"), (usage, "cache_read_input_tokens"))
    most = ((body, name) for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"))
    output = _output(usage)
    output = output if output >= 0 else _counted(*most)
    name = next((v for v in (row.get("name"), row.get("custom_id"), row.get("id")) if isinstance(v, str)), "")
    return Logged(
        name or f"line-{line.number}",
        prompt,
        answer,
        _time(row, BEGUN),
        _time(row, ENDED),
        hit,
        str(body.get("cache_salt") or ""),
        next((v for v in (body.get("session_id"), row.get("session_id")) if isinstance(v, str)), ""),
        _seconds(row),
        len(answer) or max(0, output),
        next((v[:LONGEST_CLASS] for v in (row.get("kind"), row.get("class")) if isinstance(v, str)), ""),
        _replica(path, line.number, row.get("replica")),
        line.number,
        reason,
        notes,
    )


def _replica(path: Path, number: int, value: object) -> str:
    """Return the name of the engine that served a request: a text, or a number as text."""
    if value is None:
        return ""
    if (type(value) is int and 0 <= value < MOST_TOKENS) or (isinstance(value, str) and value):
        return str(value)[:LONGEST_URL]
    raise _bad(path, number, "has a `replica` that is neither a name nor a number from 0")


@contextlib.contextmanager
def _named(path: Path, number: int) -> Iterator[None]:
    """Name the line in errors about its body."""
    try:
        yield
    except KvtuneError as error:
        if error.message.startswith(f"{path}, line "):
            raise
        kind = UsageError if isinstance(error, UsageError) else KvtuneError
        raise kind(f"{path}, line {number} {error.message}", error.hint) from error


def _output(usage: Mapping[str, Any]) -> int:
    return _counted((usage, "completion_tokens"), (usage, "output_tokens"))


def _answered(ids: Sequence[int], counted: int) -> Sequence[int]:
    """Return the tokens of an answer's text, and one more for the end token if the server counted that.

    Empty if the server's count differs in any other way: the text then lacks tokens, such as those of reasoning.
    """
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


def _counted(*fields: tuple[Mapping[str, Any], str]) -> int:
    """Return the first of these fields that has a count; -1 if none has. UsageError for a field that has another value.

    Also -1 in the field says that it is not known.
    """
    for row, name in fields:
        value = row.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if value is None or (type(value) is int and value == -1):
            continue
        if type(value) is int and 0 <= value <= MOST_TOKENS:
            return value
        raise UsageError(f"has {_shown(name, value)}: no number of tokens", f"mend or remove it; {SHOWN}")
    return -1


def _ids(value: object) -> Sequence[int] | None:
    """Return the value as token ids; None if it is something else, such as text."""
    if not isinstance(value, list) or not value or len(value) > MOST_TOKENS:
        return None
    return array("I", value) if all(type(token) is int and 0 <= token < 1 << 32 for token in value) else None


def _ids_of(row: Mapping[str, Any], name: str) -> Sequence[int] | None:
    """Return the token ids of a field that has nothing else. UsageError for a list of other values."""
    value = row.get(name)
    ids = _ids(value)
    if ids is None and isinstance(value, list) and value:
        wrong = next((token for token in value if type(token) is not int or not 0 <= token < 1 << 32), None)
        what = f"more than {MOST_TOKENS:,} token ids" if wrong is None else f"{wrong!a:.60}: no token id"
        raise UsageError(f"has {name} with {what}", f"mend or remove it; {SHOWN}")
    return ids


def _time(row: Mapping[str, Any], names: Sequence[str]) -> float | None:
    """Return the first of these fields that says a time; 0 says none. UsageError for another number or text."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str) and value:
            try:
                read = datetime.datetime.fromisoformat(value)
                seconds = (read if read.tzinfo else read.replace(tzinfo=datetime.UTC)).timestamp()
            except (ValueError, OverflowError):
                seconds = math.nan
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0:
            try:
                seconds = value / 1000.0 if abs(value) > MILLISECONDS else float(value)
            except OverflowError:
                seconds = math.nan
        else:
            continue
        if not 0 < seconds < LAST_S:
            raise UsageError(
                f"has {_shown(name, value)}: no time in seconds or milliseconds since 1970, and no date",
                f"mend or remove it; {SHOWN}",
            )
        return seconds
    return None


def _seconds(row: Mapping[str, Any]) -> float | None:
    """Return the time until the first token, in seconds; 0 says none. UsageError for a number that is no such time."""
    for name, unit in (("ttft", 1.0), ("ttft_s", 1.0), ("ttft_ms", 1e-3)):
        value = row.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value != 0:
            if not 0 < value < 1e9:
                raise UsageError(f"has {_shown(name, value)}: no time", f"mend or remove it; {SHOWN}")
            return value * unit
    return None


def _shown(name: str, value: object) -> str:
    return f"{name}={value!a:.60}"


def _bad(path: Path, number: int, what: str) -> UsageError:
    return UsageError(f"{path}, line {number} {what}", f"each line is one request; {SHOWN}")
