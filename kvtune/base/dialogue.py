"""How kvtune's processes talk: messages in JSON, each with its length and that of the bytes that follow it.

A command asks a child on its standard input; the child answers on a pipe, whose number is its first argument. What it
prints goes to a file: the last line says why a child died.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from tempfile import TemporaryFile
from typing import IO, Any, Generic, TypeVar

import msgspec

from kvtune.base import children
from kvtune.base.errors import KvtuneError

LENGTH = 8
"""Bytes of each of the two lengths."""
LONGEST = 1 << 30
PIECE = 1 << 16

Pieces = Sequence[bytes | bytearray]
M = TypeVar("M")


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A KvtuneError, as a child tells it. `number`: of the job that it is about; -1: of the child itself."""

    message: str
    hint: str = ""
    exit_code: int = 1
    number: int = -1

    @classmethod
    def of(cls, error: KvtuneError, number: int = -1) -> Refused:
        return cls(error.message, error.hint, error.exit_code, number)

    def error(self) -> KvtuneError:
        return KvtuneError(self.message, self.hint, self.exit_code)


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """What a child found, as plain data."""

    facts: dict[str, Any]


def framed(message: msgspec.Struct, content: Pieces = ()) -> list[bytes | bytearray]:
    """Return the pieces to send. `content`: pieces of the message's own `content`, which are not copied."""
    text = msgspec.json.encode(message)
    sizes = (len(text), sum(map(len, content)))
    return [b"".join(size.to_bytes(LENGTH, "big") for size in sizes) + text, *content]


class Frames(Generic[M]):
    """Puts messages together from the bytes as they come. ValueError if they are none."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.json.Decoder(kind).decode
        self._came = bytearray()

    def __bool__(self) -> bool:
        """Whether a part of a message has come."""
        return bool(self._came)

    def feed(self, data: bytes) -> Iterator[M]:
        self._came += data
        while len(self._came) >= 2 * LENGTH:
            size = int.from_bytes(self._came[:LENGTH], "big")
            rest = int.from_bytes(self._came[LENGTH : 2 * LENGTH], "big")
            begin = 2 * LENGTH + size
            if size + rest > LONGEST:
                raise ValueError("no message")
            if len(self._came) < begin + rest:
                return
            with memoryview(self._came) as view:
                message = self._decode(view[2 * LENGTH : begin])
                if rest:
                    message = msgspec.structs.replace(message, content=bytes(view[begin : begin + rest]))
            del self._came[: begin + rest]
            yield message


def questions(kind: type[M], descriptor: int = 0) -> Iterator[M]:
    """Yield what a child is asked, until there is no more. In the child."""
    frames = Frames[M](kind)
    while data := os.read(descriptor, PIECE):
        yield from frames.feed(data)


def tell(descriptor: int, message: msgspec.Struct) -> None:
    """Answer, or report, on a pipe. Messages up to PIPE_BUF bytes of several forks do not mix. In the child."""
    left = memoryview(b"".join(framed(message)))
    while left:
        left = left[os.write(descriptor, left) :]


class Dialogue(Generic[M]):
    """A child that is asked and answers with messages of one kind. It is gone where EOFError is raised."""

    def __init__(
        self,
        kind: Any,
        module: str,
        *words: str,
        interpreter: children.Interpreter = children.THIS,
        variables: Mapping[str, str] | None = None,
        start_new_session: bool = True,
    ) -> None:
        self.frames = Frames[M](kind)
        self._came: deque[M] = deque()
        self._log: IO[bytes] = TemporaryFile()  # noqa: SIM115  (closed by `end`)
        self._answers, send = os.pipe()
        try:
            self.child = children.start(
                interpreter.python(module, str(send), *words),
                variables={**interpreter.variables, **(variables or {})},
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[send],
                start_new_session=start_new_session,
            )
        finally:
            os.close(send)

    def ask(self, question: msgspec.Struct) -> None:
        assert self.child.stdin is not None
        try:
            for piece in framed(question):
                self.child.stdin.write(piece)
            self.child.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None

    def answer(self, within_s: float | None = None) -> M:
        """Wait for the next answer. TimeoutError if it takes longer than `within_s`."""
        while not self._came:
            if not select.select([self._answers], [], [], within_s)[0]:
                raise TimeoutError
            data = os.read(self._answers, PIECE)
            if not data:
                raise EOFError
            self._came.extend(self.frames.feed(data))
        return self._came.popleft()

    def last_line(self) -> str:
        """Return the last line that the child printed, "" for none."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def close(self) -> None:
        """Say that there are no more questions."""
        assert self.child.stdin is not None
        with contextlib.suppress(OSError):  # what a dead child did not read
            self.child.stdin.close()

    def end(self) -> None:
        """Kill the child, if it has not ended."""
        self.child.kill()
        self.child.wait()
        self.close()
        self._log.close()
        os.close(self._answers)
