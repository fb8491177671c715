"""What the relay tells the analyst: messages on a socket, each with its length before it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

LENGTH = 8
"""Bytes of a message's length."""
LONGEST = 1 << 30


class Settings(msgspec.Struct, tag="settings", frozen=True):
    """The first message: what the command was asked for. `log`: a path; "": no log."""

    base: str
    headers: dict[str, str]
    insecure: bool
    prefix: str
    log: str
    with_text: bool
    json: bool
    tokenizer: str = ""
    events: list[str] = []


class Sent(msgspec.Struct, tag="sent", frozen=True):
    """A request whose body came whole at `at`, or whose answer ended before. `body`: empty if it was not kept.

    `began`: when its head came. `session`: of its head; `ours`: the relay named it.
    """

    number: int
    api: str
    session: str
    ours: bool
    client: str
    began: float
    at: float
    body: bytes
    encoding: str = ""
    cut: bool = False


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """An answer's end. `how`: whole; or who closed the connection before (client, server), or unread.

    `first`: when the answer's first byte after its head came, 0.0 if none did. `cut`: `answer` is its end only.
    """

    number: int
    status: int
    kind: str
    first: float
    done: float
    how: str
    answer: bytes
    encoding: str = ""
    cut: bool = False


class Lost(msgspec.Struct, tag="lost", frozen=True):
    """Since the last message: messages that were dropped, because the analyst was slow; connections not followed."""

    messages: int = 0
    connections: int = 0


Message = Settings | Sent | Ended | Lost
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def framed(message: Message) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH, "big") + body


class Frames:
    """Puts messages together from the bytes as they come. ValueError if they are none."""

    def __init__(self) -> None:
        self._came = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        self._came += data
        while len(self._came) >= LENGTH:
            size = int.from_bytes(self._came[:LENGTH], "big")
            if size > LONGEST:
                raise ValueError("no message")
            if len(self._came) < LENGTH + size:
                return
            with memoryview(self._came) as view:
                message = _decoder.decode(view[LENGTH : LENGTH + size])
            del self._came[: LENGTH + size]
            yield message
