"""One connection's requests and answers, as the relay sees them pass, and what it keeps of each.

Kept until the analyst has it: the bodies of the four APIs' requests and their answers, as bytes. Of the heads: method,
path, the client's name, and who served it if that is asked for. All connections together keep at most `MOST_KEPT`
bytes; what exceeds that is not kept, and the answer's end still is, because it has the usage.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvtune.requests.log.bodies import APIS
from kvtune.servers.tap.http1 import Fields, Follower, Follows, Unreadable
from kvtune.servers.tap.messages import Ended, Sent

SESSION = "x-session-id"
EVENTS = "text/event-stream"
MOST_KEPT = 256 << 20
MOST_OF_ONE = 64 << 20
"""Most bytes that are kept of one body, and of one answer."""
TAIL = 64 << 10
"""Bytes of an answer's end that are kept if the whole is too large."""
PIECE = 64 << 10
"""Bytes from which on a body goes on in another piece: a body that comes by single bytes makes no more of them."""
MOST_OPEN = 1_000
"""Most requests of a connection that wait for their answers: a client that pipelines more is not followed."""
LONGEST_NAME = 40
HELD_S = (0.1, 2.0)
"""Longest time in seconds that a beginning of a head is held; the second, where its Host field must change, too."""
_STATUS = re.compile(r"[1-9][0-9]{2}")
_PRODUCT = re.compile(r"[A-Za-z0-9][\w.+-]*(?:/(?:Python|JS))?", re.ASCII)
KNOWN = {
    "claude-cli": "claude-code",
    "asyncopenai/python": "openai-python",
    "openai/python": "openai-python",
    "openai/js": "openai-js",
    "asyncanthropic/python": "anthropic-python",
    "anthropic/python": "anthropic-python",
    "anthropic/js": "anthropic-js",
    "codex_cli_rs": "codex",
}
"""Clients by the first product of their user agent, where they go by another name."""


def client_of(agent: str) -> str:
    """Return the client's name from its user agent: its first product, without the version."""
    match = _PRODUCT.match(agent)
    name = match[0].lower()[:LONGEST_NAME] if match else ""
    return KNOWN.get(name, name.partition("/")[0]) or "client"


class Budget:
    """Bytes that all connections keep together."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self.most = most
        self.held = 0

    def take(self, count: int) -> bool:
        if self.held + count > self.most:
            return False
        self.held += count
        return True

    def give(self, count: int) -> None:
        self.held -= count


@dataclass(slots=True)
class Kept:
    """A body in pieces. `cut`: it was larger than the budget; then these are the last bytes of an answer, or none."""

    budget: Budget
    tail: int = 0
    pieces: deque[bytearray] = field(default_factory=deque)
    size: int = 0
    cut: bool = False

    def add(self, part: bytes) -> None:
        if not self.cut and not (self.size + len(part) <= MOST_OF_ONE and self.budget.take(len(part))):
            self.cut = True
            self.budget.give(self.size)
        if self.cut:
            part = part[max(0, len(part) - self.tail) :]
        if self.pieces and len(self.pieces[-1]) < PIECE:
            self.pieces[-1] += part
        else:
            self.pieces.append(bytearray(part))
        self.size += len(part)
        while self.cut and self.pieces and self.size - len(self.pieces[0]) >= self.tail:
            self.size -= len(self.pieces.popleft())

    def drop(self) -> None:
        if not self.cut:
            self.budget.give(self.size)
        self.pieces, self.size, self.cut = deque(), 0, True


@dataclass(slots=True)
class Exchange:
    """A request of one of the APIs and its answer, as the analyst will be told of them, and what is kept of both.

    `ended.how`: "" while the answer has not. `asked`: whether the analyst was told of the request.
    """

    sent: Sent
    ended: Ended
    body: Kept
    answer: Kept
    asked: bool = False


class Sink(Protocol):
    """Takes what was recorded. It never blocks, and never raises."""

    def asked(self, exchange: Exchange) -> None: ...

    def begun(self, exchange: Exchange) -> None: ...

    def answered(self, exchange: Exchange) -> None: ...


@dataclass
class Numbers:
    """Numbers the requests of all connections, and names their sessions."""

    prefix: str
    """What session ids begin with: no other tap in front of the same server has the same."""
    add_session: bool = True
    host: str = ""
    """The server's own name for the Host field; "": the client's stays."""
    replica_header: str = ""
    """The header of answers that names the server behind a router, in lower case; "": the server is none."""
    budget: Budget = field(default_factory=Budget)
    last: int = 0
    unfollowed: int = 0
    """Connections whose following ended early."""

    @property
    def edits(self) -> bool:
        return self.add_session or bool(self.host)

    @property
    def held_s(self) -> float:
        return HELD_S[bool(self.host)]


class Connection:
    """Follows both directions of one connection. `asking` and `answering` return the bytes to pass on; none raises."""

    def __init__(self, sink: Sink, numbers: Numbers) -> None:
        self._sink = sink
        self._numbers = numbers
        self._open: deque[tuple[str, Exchange | None]] = deque()
        """Method and exchange (None: not recorded) of each request that waits for its answer's end."""
        self._sending: Exchange | None = None
        self._requests = Follower(
            self._request_head, self._request_body, self._request_end, answers=False, holds=numbers.edits
        )
        self._answers = Follower(
            self._answer_head, self._answer_body, self._answer_end, answers=True, holds=False
        )
        self._on = True
        """Whether requests are followed."""
        self._ended_first = ""
        """Whose end of bytes came first: client, server; "": none has come."""
        self._blind = False
        """Whether nothing more is recorded: a request or an answer could not be read."""

    @property
    def waiting(self) -> bool:
        """Whether a request waits for its answer, or its end."""
        return bool(self._open)

    def asking(self, data: bytes) -> bytes:
        if not self._on:
            return data
        try:
            return self._requests.feed(data)
        except Exception:
            held = self._requests.released() if self._numbers.edits else data
            self._on = False
            self._look_away()
            return held

    def answering(self, data: bytes) -> None:
        if not self._blind:
            try:
                self._answers.feed(data)
            except Exception:
                self._look_away()

    @property
    def holding(self) -> bool:
        return self._on and self._requests.holding

    def let_go(self) -> bytes:
        """Return what a head that is not whole holds back."""
        return self._requests.let_go() if self.holding else b""

    def ended(self, who: str) -> None:
        """The client's or the server's end of bytes has come."""
        self._ended_first = self._ended_first or who

    def closed(self, who: str) -> None:
        """End the exchanges that are open. `who` closed the connection: client or server."""
        whole = self._ended_first == "server" and self._answers.until_closed
        while self._open:
            _, exchange = self._open.popleft()
            self._finish(exchange, "whole" if whole else self._ended_first or who)
            whole = False

    def _look_away(self) -> None:
        """Record nothing more of this connection."""
        if not self._blind:
            self._blind = True
            self._numbers.unfollowed += 1
        while self._open:
            self._finish(self._open.popleft()[1], "unread")

    def _request_head(self, line: str, fields: Fields, head: bytes) -> tuple[Follows, bytes]:
        method, target, _ = line.split(" ", 2)
        if method == "CONNECT" or len(self._open) >= MOST_OPEN:
            raise Unreadable(method)
        exchange = None
        path = target.partition("?")[0]
        api = next((api for api in APIS if path.endswith(api)), "") if method == "POST" else ""
        if api and not self._blind:
            self._numbers.last += 1
            number, budget = self._numbers.last, self._numbers.budget
            own = fields.get(SESSION, "")
            ours = not own and self._numbers.add_session and bool(head)
            session = f"{self._numbers.prefix}{number}" if ours else own
            client, encoding = client_of(fields.get("user-agent", "")), fields.get("content-encoding", "")
            sent = Sent(number, api, session, client, time.time(), encoding=encoding)
            exchange = Exchange(sent, Ended(number), Kept(budget), Kept(budget, TAIL))
            if ours:
                head = head[:-2] + f"X-Session-ID: {session}\r\n\r\n".encode()
        if self._numbers.host and head:
            head = _with_host(head, self._numbers.host)
        if not self._blind:
            self._open.append((method, exchange))
        self._sending = exchange
        return "body", head

    def _request_body(self, part: bytes) -> None:
        if self._sending is not None and not self._sending.ended.how:
            self._sending.body.add(part)

    def _request_end(self) -> None:
        if self._sending is not None and not self._sending.asked and not self._sending.ended.how:
            self._ask(self._sending)
        self._sending = None

    def _answer_head(self, line: str, fields: Fields, head: bytes) -> tuple[Follows, bytes]:
        status_text = line.split(" ", 2)[1]
        if not _STATUS.fullmatch(status_text):
            raise Unreadable("no status")
        status = int(status_text)
        if not self._open:
            raise Unreadable("an answer without a request")
        method, exchange = self._open[0]
        if status == 101:
            self._requests.become_raw()
            while self._open:  # what follows is of another protocol
                self._finish(self._open.popleft()[1], "unread")
            return "raw", head
        if status < 200:
            return "head", head
        if exchange is not None:
            ended, named = exchange.ended, self._numbers.replica_header
            ended.status, ended.kind = status, fields.get("content-type", "")
            ended.encoding = fields.get("content-encoding", "")
            ended.replica = fields.get(named, "") if named else ""
        bare = status in (204, 304) or method == "HEAD"
        return "nothing" if bare else "body", head

    def _answer_body(self, part: bytes) -> None:
        exchange = self._open[0][1] if self._open else None
        if exchange is not None and part:
            if not exchange.ended.first:
                exchange.ended.first = time.time()
                if exchange.asked and exchange.ended.kind.lower().startswith(EVENTS):
                    self._sink.begun(exchange)
            exchange.answer.add(part)

    def _answer_end(self) -> None:
        if self._open:
            self._finish(self._open.popleft()[1], "whole")

    def _finish(self, exchange: Exchange | None, ending: str) -> None:
        if exchange is None:
            return
        if not exchange.asked:
            exchange.body.drop()
            self._ask(exchange)
        exchange.ended.done, exchange.ended.how = time.time(), ending
        self._tell(self._sink.answered, exchange)
        exchange.answer.drop()

    def _ask(self, exchange: Exchange) -> None:
        exchange.asked = True
        self._tell(self._sink.asked, exchange)
        exchange.body.drop()

    def _tell(self, tell: Callable[[Exchange], None], exchange: Exchange) -> None:
        with contextlib.suppress(Exception):  # what a sink fails to take is counted as lost at the end
            tell(exchange)


def _with_host(head: bytes, host: str) -> bytes:
    """Return the head with the server's own name in its Host field: that of a TLS server must be its own."""
    line, *fields = head[:-4].split(b"\r\n")
    kept = [field for field in fields if field.partition(b":")[0].strip().lower() != b"host"]
    return b"\r\n".join([line, b"Host: " + host.encode(), *kept]) + b"\r\n\r\n"
