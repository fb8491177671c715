"""What the relay and the analyst tell each other (`kvtune/base/dialogue.py`).

A body is a list of pieces from its connection to the socket: no copy on the relay's loop grows with it.
"""

from __future__ import annotations

import msgspec


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
    routed: bool = False
    """Whether `base` is a router, whose answers name their server."""


class Sent(msgspec.Struct, tag="sent", frozen=True):
    """A request whose body came whole, or whose answer ended before. `content`: its body, if it was kept.

    `api`: one of `APIS`, its path. `began`: when its head came. `session`: of its head, "" if it has none. `lost`: one
    before it was not told. Times are time.time().
    """

    number: int
    api: str
    session: str
    client: str
    began: float
    content: bytes = b""
    encoding: str = ""
    cut: bool = False
    lost: bool = False


class Begun(msgspec.Struct, tag="begun", frozen=True):
    """A stream's first byte after its head has come."""

    number: int


class Ended(msgspec.Struct, tag="ended"):
    """An answer's end. `how`: whole; or who closed the connection before (client, server, tap), or unread.

    `first`: when the answer's first byte after its head came, 0.0 if none did. `content`: the whole, or its end only.
    `replica`: what the head says of the server behind a router, as it came.
    """

    number: int
    status: int = 0
    kind: str = ""
    first: float = 0.0
    done: float = 0.0
    how: str = ""
    content: bytes = b""
    encoding: str = ""
    replica: str = ""


class Outcome(msgspec.Struct, tag="outcome", frozen=True):
    """What the analyst answers to a request's end. `why`: why it is not recorded; "": it is."""

    number: int
    why: str = ""


Message = Settings | Sent | Begun | Ended | Outcome
