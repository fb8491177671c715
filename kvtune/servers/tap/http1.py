"""Follows one direction of an HTTP/1.1 connection, without taking part in it: where messages begin and end. Pure.

Every byte that is fed comes out again, in order and unchanged, except that the owner may give a request's head another
form. Only such a head is held, until it is whole or the caller lets it go. `Unreadable` ends the following: the caller
passes on what is held.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from re import compile as pattern

MOST_HEAD = 64 << 10
"""Largest head, chunk size or trailer line in bytes: uvicorn's own limit for a head."""
_END = pattern(rb"\n\r?\n")
_NUMBER = pattern(r"[0-9]{1,18}")
_SIZE = pattern(rb"[0-9a-fA-F]{1,15}")


class Unreadable(Exception):
    """What came is no HTTP/1 that can be followed."""


class Body(Enum):
    """What follows a head, according to the owner of the message."""

    FRAMED = auto()
    """As the head's fields say."""
    NONE = auto()
    MORE = auto()
    """Another head of the same answer: this one was informational (1xx)."""
    RAW = auto()
    """Bytes of another protocol: the connection was upgraded."""


Fields = dict[str, str]
"""A head's fields by lower-case name. Fields of the same name are joined by commas."""


class Follower:
    """Tells its owner of each message's `head`, the parts of its `body`, and its `end`.

    `head` returns what follows it, and the bytes to pass on in its place; b"": it has passed already. `answers`:
    follows answers, whose body may last until the connection ends. `holds`: heads wait until whole.
    """

    def __init__(
        self,
        head: Callable[[str, Fields, bytes], tuple[Body, bytes]],
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
        """Of this feed, what is followed and passed on."""
        self._gone = 0
        """Bytes at the start of `_came` that have passed, though they are not followed yet."""
        self._left = 0
        self._searched = 0
        """Bytes of `_came` in which the end of a head or line was not found: a sender of single bytes costs no more."""
        self._step: Callable[[], bool] = self._head

    @property
    def until_closed(self) -> bool:
        """Whether a body is open that the connection's end completes."""
        return self._step == self._rest

    @property
    def holding(self) -> bool:
        """Whether bytes wait for the end of their head."""
        return self._holds and len(self._came) > self._gone

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to pass on now."""
        self._came += data
        while self._came and self._step():
            pass
        if not self._holds:
            self._passed.clear()
            return data
        passed = bytes(self._passed)
        self._passed.clear()
        if self._step != self._head or self._gone:
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
        self._step = self._raw

    def _pass(self, count: int) -> bytes:
        part = bytes(self._came[:count])
        del self._came[:count]
        self._searched = 0
        if self._holds:
            self._passed += part[self._gone :]
        self._gone = max(0, self._gone - count)
        return part

    def _raw(self) -> bool:
        self._pass(len(self._came))
        return False

    def _head(self) -> bool:
        if bytes(self._came[:1]) in (b"\r", b"\n"):  # an empty line before a head is none
            self._pass(1)
            return True
        match = _END.search(self._came, self._searched, MOST_HEAD)
        if match is None:
            if len(self._came) >= MOST_HEAD or not self._came[:1].isalpha():
                raise Unreadable("no HTTP/1 head")
            self._searched = max(0, len(self._came) - 3)
            return False
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
        body, instead = self._told_head(line, fields, b"" if self._gone else head)
        if self._holds and not self._gone:
            self._passed += instead
            self._gone = len(head)
        self._pass(len(head))
        self._follow(body, fields)
        return True

    def _follow(self, body: Body, fields: Fields) -> None:
        if body is Body.RAW:
            self.become_raw()
        elif body is Body.NONE:
            self._told_end()
        elif body is Body.FRAMED:
            if "chunked" in fields.get("transfer-encoding", "").lower():
                self._step = self._size
            elif (length := fields.get("content-length")) is not None:
                first, *others = (part.strip() for part in length.split(","))
                if not _NUMBER.fullmatch(first) or any(other != first for other in others):
                    raise Unreadable("a wrong content-length")
                self._left = int(first)
                self._step = self._length
                self._ended_if_empty()
            elif self._answers:
                self._step = self._rest
            else:
                self._told_end()

    def _ended_if_empty(self) -> None:
        if self._left == 0:
            self._step = self._head
            self._told_end()

    def _take(self) -> None:
        part = self._pass(min(self._left, len(self._came)))
        self._left -= len(part)
        self._told_body(part)

    def _length(self) -> bool:
        self._take()
        self._ended_if_empty()
        return True

    def _rest(self) -> bool:
        self._told_body(self._pass(len(self._came)))
        return False

    def _line(self) -> bytes | None:
        end = self._came.find(b"\r\n", self._searched, MOST_HEAD)
        if end < 0:
            if len(self._came) >= MOST_HEAD:
                raise Unreadable("a line of a chunked body that does not end")
            self._searched = max(0, len(self._came) - 1)
            return None
        return self._pass(end + 2)[:-2]

    def _size(self) -> bool:
        line = self._line()
        if line is None:
            return False
        size = line.partition(b";")[0].strip()
        if not _SIZE.fullmatch(size):
            raise Unreadable("a wrong chunk size")
        self._left = int(size, 16)
        self._step = self._chunk if self._left else self._trailer
        return True

    def _chunk(self) -> bool:
        self._take()
        if self._left == 0:
            self._step = self._after_chunk
        return True

    def _after_chunk(self) -> bool:
        line = self._line()
        if line is None:
            return False
        if line:
            raise Unreadable("a chunk longer than its size")
        self._step = self._size
        return True

    def _trailer(self) -> bool:
        line = self._line()
        if line is None:
            return False
        if not line:
            self._step = self._head
            self._told_end()
        return True
