"""Follows one direction of an HTTP/1.1 connection, without taking part in it: where messages begin and end. Pure.

Every byte that is fed comes out again, in order and unchanged, except that the owner may give a request's head another
form. Only such a head is held, until it is whole or the caller lets it go. `Unreadable` ends the following: the caller
passes on what is held.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from re import compile as pattern
from typing import Literal

MOST_HEAD = 64 << 10
"""Largest head, chunk size or trailer line in bytes: uvicorn's own limit for a head."""
_END = pattern(rb"\n\r?\n")
_NUMBER = pattern(r"[0-9]{1,18}")
_SIZE = pattern(rb"[0-9a-fA-F]{1,15}")


class Unreadable(Exception):
    """What came is no HTTP/1 that can be followed."""


Follows = Literal["body", "nothing", "head", "raw"]
"""What follows a head, according to its owner: a body as its fields say; nothing; another head of the same answer (this
one was informational, 1xx); bytes of another protocol, to which the connection was upgraded."""
Fields = dict[str, str]
"""A head's fields by lower-case name. Fields of the same name are joined by commas."""


class Follower:
    """Tells its owner of each message's `head`, the parts of its `body`, and its `end`.

    `head` returns what follows it, and the bytes to pass on in its place; b"": it has passed already. `answers`:
    follows answers, whose body may last until the connection ends. `holds`: heads wait until whole.
    """

    def __init__(
        self,
        head: Callable[[str, Fields, bytes], tuple[Follows, bytes]],
        body: Callable[[bytes], None],
        end: Callable[[], None],
        *,
        answers: bool,
        holds: bool,
    ) -> None:
        self._told_head, self._told_body, self._told_end = head, body, end
        self._answers = answers
        self._holds = holds
        self._came = bytearray()
        """What is not followed yet."""
        self._passed = bytearray()
        """What of this feed is followed and passed on."""
        self._gone = 0
        """Bytes at the start of `_came` that have passed, though they are not followed yet."""
        self._searched = 0
        """Bytes of `_came` in which the end of a head or line was not found: a sender of single bytes costs no more."""
        self._in_head = True
        self.until_closed = False
        """Whether a body is open that the connection's end completes."""
        self._steps: Iterator[None] = self._messages()

    @property
    def holding(self) -> bool:
        """Whether bytes wait for the end of their head."""
        return self._holds and len(self._came) > self._gone

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to pass on now."""
        self._came += data
        if self._came:
            next(self._steps)
        if not self._holds:
            self._passed.clear()
            return data
        passed = bytes(self._passed)
        self._passed.clear()
        if not self._in_head or self._gone:
            passed += self.let_go()
        return passed

    def let_go(self) -> bytes:
        """Return what is held. Its head is still followed, and can no longer have another form."""
        held = bytes(self._came[self._gone :]) if self._holds else b""
        self._gone = len(self._came)
        return held

    def released(self) -> bytes:
        """Return what is held and not passed on, and follow no further."""
        held = bytes(self._passed) + self.let_go() if self._holds else b""
        self.become_raw()
        self._came.clear()
        self._passed.clear()
        self._gone = 0
        return held

    def become_raw(self) -> None:
        self._steps = self._raw()

    def _pass(self, count: int) -> bytes:
        part = bytes(self._came[:count])
        del self._came[:count]
        self._searched = 0
        if self._holds:
            self._passed += part[self._gone :]
        self._gone = max(0, self._gone - count)
        return part

    def _messages(self) -> Iterator[None]:
        """Follow one message after another. Each `yield` waits for more bytes."""
        while True:
            self._in_head = True
            follows, fields = yield from self._head()
            self._in_head = False
            if follows == "raw":
                yield from self._raw()
            if follows == "body":
                yield from self._framed(fields)
            if follows != "head":
                self._told_end()

    def _raw(self) -> Iterator[None]:
        while True:
            self._pass(len(self._came))
            yield

    def _head(self) -> Generator[None, None, tuple[Follows, Fields]]:
        while True:
            while self._came.startswith((b"\r", b"\n")):  # an empty line before a head is none
                self._pass(1)
            if (match := _END.search(self._came, self._searched, MOST_HEAD)) is not None:
                break
            if self._came and (len(self._came) >= MOST_HEAD or not self._came[:1].isalpha()):
                raise Unreadable("no HTTP/1 head")
            self._searched = max(0, len(self._came) - 3)
            yield
        head = bytes(self._came[: match.end()])
        if not head.endswith(b"\r\n\r\n") or head.count(b"\n") != head.count(b"\r\n"):
            raise Unreadable("a head with bare line feeds")
        line, *rest = head[:-4].decode("latin-1").split("\r\n")
        version = line if self._answers else line.rpartition(" ")[2]
        if not version.startswith("HTTP/1."):
            raise Unreadable("no HTTP/1 head")
        fields: Fields = {}
        for header in rest:
            name, _, value = header.partition(":")
            if name != name.strip():
                raise Unreadable("a field that is folded, or has a blank in its name")
            name, value = name.lower(), value.strip()
            fields[name] = f"{fields[name]}, {value}" if name in fields else value
        follows, instead = self._told_head(line, fields, b"" if self._gone else head)
        if self._holds and not self._gone:
            self._passed += instead
            self._gone = len(head)
        self._pass(len(head))
        return follows, fields

    def _framed(self, fields: Fields) -> Iterator[None]:
        """Follow a body to its end, as the head's fields say."""
        if "chunked" in fields.get("transfer-encoding", "").lower():
            while size := (yield from self._chunk_size()):
                yield from self._part(size)
                if (yield from self._line()):
                    raise Unreadable("a chunk longer than its size")
            while (yield from self._line()):  # trailers
                pass
        elif (length := fields.get("content-length")) is not None:
            first, *others = (part.strip() for part in length.split(","))
            if not _NUMBER.fullmatch(first) or any(other != first for other in others):
                raise Unreadable("a wrong content-length")
            yield from self._part(int(first))
        elif self._answers:
            self.until_closed = True
            while True:
                self._told_body(self._pass(len(self._came)))
                yield

    def _part(self, left: int) -> Iterator[None]:
        while left:
            while not self._came:
                yield
            part = self._pass(min(left, len(self._came)))
            left -= len(part)
            self._told_body(part)

    def _line(self) -> Generator[None, None, bytes]:
        while (end := self._came.find(b"\r\n", self._searched, MOST_HEAD)) < 0:
            if len(self._came) >= MOST_HEAD:
                raise Unreadable("a line of a chunked body that does not end")
            self._searched = max(0, len(self._came) - 1)
            yield
        return self._pass(end + 2)[:-2]

    def _chunk_size(self) -> Generator[None, None, int]:
        size = (yield from self._line()).partition(b";")[0].strip()
        if not _SIZE.fullmatch(size):
            raise Unreadable("a wrong chunk size")
        return int(size, 16)
