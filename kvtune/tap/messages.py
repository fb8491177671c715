"""What the relay and the analyst tell each other: messages, each with its length and that of its bytes before it.

A body is a list of pieces from its connection to the socket: no copy on the relay's loop grows with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

LENGTH = 8
"""Bytes of each of the two lengths."""
LONGEST = 1 << 30


class Settings(msgspec.Struct, tag="settings", frozen=True):
    """The first message: what the command was asked for. `log`: a path; "": no log. `secrets`: what it was given."""

    base: str
    headers: dict[str, str]
    insecure: bool
    prefix: str
    log: str
    with_text: bool
    json: bool
    tokenizer: str = ""
    events: list[str] = []
    secrets: list[str] = []


class Sent(msgspec.Struct, tag="sent", frozen=True):
    """A request whose body came whole at `at`, or whose answer ended before. `content`: its body, if it was kept.

    `began`: when its head came. `session`: of its head; `ours`: the relay named it. `lost`: one before it was not told.
    """

    number: int
    api: str
    session: str
    ours: bool
    client: str
    began: float
    at: float
    content: bytes = b""
    encoding: str = ""
    cut: bool = False
    lost: bool = False


class Begun(msgspec.Struct, tag="begun", frozen=True):
    """A stream's first byte after its head has come, at `at`."""

    number: int
    at: float


class Ended(msgspec.Struct, tag="ended", frozen=True):
    """An answer's end. `how`: whole; or who closed the connection before (client, server, tap), or unread.

    `first`: when the answer's first byte after its head came, 0.0 if none did. `cut`: `content` is its end only.
    """

    number: int
    status: int
    kind: str
    first: float
    done: float
    how: str
    content: bytes = b""
    encoding: str = ""
    cut: bool = False


class Outcome(msgspec.Struct, tag="outcome", frozen=True):
    """What the analyst answers to a request's end. `why`: why it is not in the log."""

    number: int
    logged: bool
    why: str = ""


Message = Settings | Sent | Begun | Ended | Outcome
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def framed(message: Message, content: Sequence[bytes | bytearray] = ()) -> list[bytes | bytearray]:
    """Return the pieces to send. `content`: pieces of the message's own."""
    text = _encoder.encode(message)
    sizes = (len(text), sum(map(len, content)))
    return [b"".join(size.to_bytes(LENGTH, "big") for size in sizes) + text, *content]


class Frames:
    """Puts messages together from the bytes as they come. ValueError if they are none."""

    def __init__(self) -> None:
        self._came = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
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
                message = _decoder.decode(view[2 * LENGTH : begin])
                if rest and isinstance(message, Sent | Ended):
                    message = msgspec.structs.replace(message, content=bytes(view[begin : begin + rest]))
            del self._came[: begin + rest]
            yield message
