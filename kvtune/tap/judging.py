"""Judges each request: its hit, the causes of its misses, the earlier prompt that it differs from, its session.

In: requests in order of time (`opened` when sent, `closed` when answered). Hits are the server's own count.
Causes are those of a log without events, as `kvtune/watch/requests.py` has them.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvtune.errors import KvtuneError
from kvtune.tap.messages import Settings
from kvtune.text.divergence import Divergences
from kvtune.watch.requests import Asked, ByLog, Seen
from kvtune.watch.server import Server

USUAL_BLOCK = 16
"""vLLM's block size where the server does not say it."""
MOST_TOKENS = 16 << 20
"""Most tokens of earlier prompts that are remembered. Beyond that all are forgotten, and later prompts count as new."""
MOST_SESSIONS = 10_000
MOST_REMEMBERED = 500
"""Requests whose names are remembered."""
ASK_S = 1.0
"""Shortest time in seconds between two questions whether the server was restarted."""


@dataclass(slots=True)
class Request:
    """One prompt of a request. Times are time.time(), 0.0: not yet; counts -1: not known.

    `session`: the session id that the server saw. `hit`, `reported`: cached and all prompt tokens that it reported.
    """

    number: int
    name: str
    client: str
    api: str
    session: str
    body: Mapping[str, Any]
    prompt: Sequence[int]
    began: float
    salt: str = ""
    answer: Sequence[int] = ()
    first: float = 0.0
    ended: float = 0.0
    hit: int = -1
    reported: int = -1
    output_tokens: int = -1
    group: str = ""
    """Its session: requests whose messages grow one from another."""
    seen: Seen | None = None
    differs: Differs | None = None

    @property
    def tokens(self) -> int:
        """Prompt tokens, as the server counts them; -1: not known."""
        return self.reported if self.reported >= 0 else len(self.prompt) or -1


@dataclass(frozen=True, slots=True)
class Differs:
    """A prompt differs from that of request `number` from token `token` on; `after`: tokens that both have later."""

    number: int
    token: int
    after: int


@dataclass(slots=True)
class Judged:
    """A request at its end. `hit` -1: not known; `by`: who counted it. `why`: why its token ids are not known."""

    request: Request
    hit: int = -1
    by: str = ""
    causes: dict[str, int] = field(default_factory=dict)
    status: int = 0
    how: str = "whole"
    error: str = ""
    why: str = ""
    logged: bool = False


class Judging:
    def __init__(self, settings: Settings) -> None:
        self._server = Server(settings.base, settings.headers, settings.insecure)
        self._by_log: ByLog | None = None
        self._started: float | None = None
        self._asked_at = 0.0
        self._tokens = 0
        self._divergences = Divergences()
        self._numbers: OrderedDict[int, int] = OrderedDict()
        """The number of the request of each prompt that was added to the divergences."""
        self._added = 0
        self._groups = Groups()

    def opened(self, one: Request) -> None:
        one.group = self._groups.of(one)
        self._tokens += len(one.prompt)
        if self._tokens > MOST_TOKENS:
            self._forget()
            self._tokens = len(one.prompt)
        one.seen = self._log().open(_asked(one))
        _, found = self._divergences.add(one.prompt, number=self._added)
        self._numbers[self._added] = one.number
        self._added += 1
        if found is not None and found.like in self._numbers:
            one.differs = Differs(self._numbers[found.like], found.at, found.after)

    def closed(self, one: Request) -> Judged:
        judged = Judged(one, one.hit, "usage" if one.hit >= 0 else "")
        if one.seen is None:
            return judged
        if one.hit >= 0 and one.hit < one.seen.agrees and self._restarted(one.ended):
            self._forget()
            one.seen = self._log().open(_asked(one))
        answered = self._log().close(_asked(one), one.seen)
        judged.causes = answered.causes if one.hit >= 0 else {}
        return judged

    def look(self) -> None:
        """Do what is due between two requests."""

    def _log(self) -> ByLog:
        if self._by_log is None:
            size, self._started = USUAL_BLOCK, None
            try:
                scrape = self._server.scrape()
                size, self._started = scrape.block_size or USUAL_BLOCK, scrape.started
            except KvtuneError:
                pass
            self._by_log = ByLog(size)
        return self._by_log

    def _restarted(self, now: float) -> bool:
        """Whether the server has been restarted since it was last asked."""
        if now - self._asked_at < ASK_S:
            return False
        self._asked_at = now
        try:
            started = self._server.scrape().started
        except KvtuneError:
            return False
        anew = None not in (started, self._started) and started != self._started
        self._started = started if started is not None else self._started
        return anew

    def _forget(self) -> None:
        if self._by_log is not None:
            self._by_log.anew()
        self._divergences = Divergences()
        self._numbers.clear()

    def close(self) -> None:
        self._server.close()


class Groups:
    """Finds sessions: a request whose messages begin with all messages of an earlier one goes on with its session."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self._last = 0

    def of(self, one: Request) -> str:
        chain = [*_chain(one)]
        found = next((self._known[name] for name in reversed(chain) if name in self._known), "")
        if not found:
            self._last += 1
            found = f"s{self._last}"
        if chain:
            self._known[chain[-1]] = found
            self._known.move_to_end(chain[-1])
        while len(self._known) > MOST_SESSIONS:
            self._known.popitem(last=False)
        return found


def _chain(one: Request) -> list[bytes]:
    """Return a hash of each beginning of the request's messages, without system texts: those differ in one session."""
    messages = one.body.get("messages", one.body.get("input"))
    digest = hashlib.blake2b(f"{one.client}\n{one.salt}\n".encode(), digest_size=16)
    if not isinstance(messages, list):
        text = messages if isinstance(messages, str) else json.dumps(one.body.get("prompt"))
        digest.update(text.encode(errors="replace"))
        return [digest.digest()]
    chain = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else ""
        if role in ("system", "developer"):
            continue
        digest.update(_text(message).encode(errors="replace"))
        chain.append(digest.digest())
    return chain


def _text(message: object) -> str:
    """Return a message's text for comparison: marks that move from turn to turn, such as `cache_control`, left out."""
    if isinstance(message, dict):
        kept = {name: _text(value) for name, value in message.items() if name != "cache_control"}
        return json.dumps(kept, sort_keys=True)
    if isinstance(message, list):
        return "".join(_text(part) for part in message)
    return str(message)


def _asked(one: Request) -> Asked:
    return Asked(one.name, one.prompt, one.answer, one.began, one.ended, one.hit, one.salt)
