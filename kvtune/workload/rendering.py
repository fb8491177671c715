"""Turns a request's body into token ids by a tokenizer and its chat template, as vLLM does, or into bytes.

Runs in any process that builds a workload. A tokenizer's folder may come from anyone, and its template and its regular
expressions are programs: each tokenizer runs in a child with limits of time and memory (`render_child.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import stat
import weakref
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from kvtune.errors import KvtuneError, UsageError
from kvtune.workload.bodies import Body, body_of, refuse_elsewhere
from kvtune.workload.conversation import Conversation, conversation
from kvtune.workload.render_pipe import IDS, LOAD, REFUSED, TEXT, cpu_s, received, sent

if TYPE_CHECKING:
    from kvtune.children import Child

AUTO, BYTES = "auto", "bytes"
"""Special values of a workload's key `tokenizer`: the model's own tokenizer, and no tokenizer (bytes)."""
NO_TOKENIZER = "tokenizer=FOLDER names a folder that has one; tokenizer=bytes compares bytes of the text"
MOST_FILE_BYTES = 1 << 30
"""Size limit of each file of a tokenizer's folder but the model's weights. The largest tokenizers have 40 MB."""


class Renderer(Protocol):
    """Renders bodies as token ids. `name` is shown in messages."""

    name: str

    def ids(self, body: Mapping[str, Any] | Body) -> Sequence[int]:
        """Return the prompt of a body as token ids."""

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token ids."""


@lru_cache(maxsize=4)
def renderer(tokenizer: str) -> Renderer:
    """Make a renderer. `tokenizer`: a folder, a model in the local cache, or `bytes`. UsageError if it is missing."""
    return Bytes() if tokenizer == BYTES else Rendering(tokenizer)


def rendered_by(tokenizer: str) -> Callable[[Body], Sequence[int]] | None:
    """Return a function that renders a body and loads the tokenizer when first called; None for "auto"."""

    def ids(body: Body) -> Sequence[int]:
        try:
            by = renderer(tokenizer)
        except KvtuneError as error:
            kind = UsageError if isinstance(error, UsageError) else KvtuneError
            raise kind(f"has text, and {error.message}", error.hint) from error
        return by.ids(body)

    return None if tokenizer == AUTO else ids


class Bytes:
    """Renders without a tokenizer or template: plain text in UTF-8, one token a byte."""

    name = BYTES

    def ids(self, body: Mapping[str, Any] | Body) -> Sequence[int]:
        asked = body_of(body)
        prompt = prompt_of(asked)
        if prompt is None:
            prompt = plain(conversation(asked))
        return array("I", list(prompt.encode("utf-8", "surrogatepass")))

    def text(self, ids: Sequence[int]) -> str:
        return bytes(list(ids)).decode("utf-8", "replace")


def plain(said: Conversation) -> str:
    """Write a conversation as plain text: tools as JSON, a line each, then each message after its role."""
    lines = ["tools", *(json.dumps(tool, ensure_ascii=False) for tool in said.tools)] if said.tools else []
    for message in said.messages:
        lines += [message["role"], *(part["text"] for part in message["content"])]
        lines += [str(message["reasoning"])] if message.get("reasoning") else []
        lines += [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join([*lines, ""])


def prompt_of(body: Body) -> str | None:
    """Return the prompt of a body of /v1/completions; None for the other APIs."""
    if body.is_chat:
        return None
    refuse_elsewhere(body)
    prompt = body.fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise UsageError("has several prompts", "write a line for each of them")
    return prompt


def _check_files(folder: Path) -> None:
    """Raise UsageError for a file that a tokenizer could read for ever: a pipe, a device, one without end."""
    for path in sorted(folder.iterdir()):
        try:
            found = path.stat()
        except OSError:
            continue  # a broken link: transformers says which file is missing
        kind = found.st_mode
        large = found.st_size > MOST_FILE_BYTES and path.suffix in (".json", ".jinja", ".model", ".txt")
        if large or not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            what = f"larger than {MOST_FILE_BYTES:,} bytes" if large else "no regular file"
            raise UsageError(f"{folder} has no tokenizer: {path.name} is {what}", NO_TOKENIZER)


class Rendering:
    """Renders in a child of limited time and memory, which ends with this process."""

    def __init__(self, tokenizer: str) -> None:
        from subprocess import PIPE  # here, because the CLI's help imports this module
        from tempfile import TemporaryFile

        from kvtune.children import python, start

        folder = Path(tokenizer).expanduser()
        if folder.is_dir():
            _check_files(folder)
        self.name = tokenizer
        self._errors: IO[bytes] = TemporaryFile()  # noqa: SIM115  (closed by _end)
        self._child = start(
            python("kvtune.workload.render_child"),
            variables={"TOKENIZERS_PARALLELISM": "false"},
            stdin=PIPE,
            stdout=PIPE,
            stderr=self._errors,
        )
        self._close = weakref.finalize(self, _end, self._child, self._errors, os.getpid())
        try:
            self._asked(LOAD, tokenizer.encode())
        except UsageError:  # no tokenizer: nothing will be asked
            self._close()
            raise

    def ids(self, body: Mapping[str, Any] | Body) -> Sequence[int]:
        ids = array("I")
        ids.frombytes(self._asked(IDS, json.dumps(body_of(body)).encode()))
        return ids

    def text(self, ids: Sequence[int]) -> str:
        return self._asked(TEXT, array("I", ids).tobytes()).decode("utf-8", "surrogatepass")

    def _asked(self, what: int, given: bytes) -> bytes:
        if not self._close.alive:
            raise KvtuneError(
                f"cannot be rendered: {self.name} ended its process before", "use another tokenizer"
            )
        assert self._child.stdin is not None and self._child.stdout is not None
        try:
            sent(self._child.stdin, what, given)
            kind, answer = received(self._child.stdout)
        except (EOFError, BrokenPipeError):
            code, said = self._child.wait(), self._last_error()
            self._close()
            raise KvtuneError(*_ended(code, said, what, given, self.name)) from None
        except BaseException:  # Ctrl-C in between: the next answer would be that of this question
            self._close()
            raise
        if kind == REFUSED:
            raise UsageError(*json.loads(answer))
        return answer

    def _last_error(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _end(child: Child, errors: IO[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the process that started it
        return
    child.kill()
    child.wait()
    for stream in (child.stdin, child.stdout, errors):
        if stream is not None:
            with contextlib.suppress(OSError):  # what a dead child did not read
                stream.close()


def _ended(code: int, said: str, what: int, given: bytes, name: str) -> tuple[str, str]:
    """Return message and hint for a child that ended."""
    hint = f"look at the chat template and the tokenizer of {name}; tokenizer=bytes needs neither"
    if code in (-signal.SIGPROF, -signal.SIGALRM):
        taken = f"takes more than {cpu_s(what, len(given)):.0f} s"
        return (f"{name} {taken} to load" if what == LOAD else f"{taken} to render with {name}"), hint
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    why = f"{how}{': ' if said else ''}{said[:200]}"
    verb = f"{name} ends" if what == LOAD else "ends"
    return f"{verb} the process that renders with {name} ({why})", hint
