"""Judges each request: its hit, the causes of its misses, the earlier prompt that it differs from, its session.

In: requests in order of time (`opened` when sent, `closed` when answered, `dropped` if nothing was computed), and the
server's KV events, if it publishes any. Hits are the server's own count, else those of the events. Causes are those of
the events where both counts agree, else those of a log without events.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

from kvtune.causes import DIVERGED
from kvtune.errors import KvtuneError
from kvtune.tap.joining import LATE_S, Joining
from kvtune.tap.limits import REQUEST_S, TooLongError, cpu_limit
from kvtune.tap.messages import Settings
from kvtune.text.divergence import Divergence, Divergences
from kvtune.text.edits import Edit, Shapes, Work, edits
from kvtune.watch.endpoints import Named
from kvtune.watch.events import Received
from kvtune.watch.metrics import Scrape, begun_anew
from kvtune.watch.requests import Asked, ByLog, Seen
from kvtune.watch.server import Server
from kvtune.workload.token_ids import agreeing, packed

Result = TypeVar("Result")
USUAL_BLOCK = 16
"""vLLM's block size where the server does not say it."""
MOST_TOKENS = 16 << 20
"""Most tokens of earlier prompts that are remembered. Beyond that all are forgotten, and later prompts count as new."""
MOST_SESSIONS = 10_000
MOST_NEAR = 4
"""The client's newest sessions of which a request may be a changed one."""
FEWEST = 3
"""Messages that a session must have for that: two sessions may begin with the same question."""
MOST_REMEMBERED = 200
"""Requests whose text is remembered."""
AGAIN_S = 30.0
"""Shortest time in seconds between two questions for KV events, of a server that publishes none."""
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
    asked: Asked | None = None
    """As the join with events knows it."""
    seen: Seen | None = None
    differs: Differs | None = None
    part: int = 0
    """Of a request with several prompts: which one it is, from 1."""
    trouble: str = ""
    """Why it was not analysed, or only in part."""

    @property
    def label(self) -> str:
        return f"#{self.number}" + (f".{self.part}" if self.part else "")

    @property
    def tokens(self) -> int:
        """Prompt tokens, as the server counts them; -1: not known."""
        return self.reported if self.reported >= 0 else len(self.prompt) or -1


@dataclass(frozen=True, slots=True)
class Differs:
    """A prompt differs from that of request `number` from token `token` on.

    `after`: tokens after it that both prompts have; -1: not counted. `edits`: where and how the texts differ; empty if
    the requests are the same there, and the server renders them differently.
    """

    number: int
    token: int
    after: int
    edits: tuple[Edit, ...] = ()
    alike: bool = True
    """Whether both are requests of one session."""


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
    unwritten: str = ""
    """Why the log does not have it."""
    logged: bool = False


class Judging:
    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._server = Server(settings.base, settings.headers, settings.insecure)
        self._say = say
        self._named = Named(settings.events)
        self.joining: Joining | None = None
        self._tried_at = 0.0
        self._begin()
        self._by_log: ByLog | None = None
        self._scrape: Scrape | None = None
        self._asked_at = 0.0
        self._tokens = 0
        self._divergences = Divergences()
        self._shapes: Shapes = {}
        self._added = 0
        self._groups = Groups()
        self._recent: OrderedDict[int, Request] = OrderedDict()
        """Requests whose text later ones are compared with, by their number in `_divergences`."""
        self._newest: OrderedDict[str, int] = OrderedDict()
        """Of each session, the number of its newest request there."""

    def _begin(self) -> None:
        """Read the server's events, if it publishes any; ask it again after a while if it does not."""
        now = time.monotonic()
        if self.joining is not None and (self.joining.on or now < self._tried_at + AGAIN_S):
            return
        if self.joining is not None:
            self.joining.close()
        self._tried_at = now
        self.joining = Joining(self._server, self._named, self._say)

    def opened(self, one: Request) -> None:
        one.group = _limited(one, lambda: self._groups.of(one), f"#{one.number}")
        self._tokens += len(one.prompt)
        if self._tokens > MOST_TOKENS:
            self._forget()
            self._tokens = len(one.prompt)
        one.asked = _asked(one, math.inf)
        one.seen = self._log().open(one.asked)
        self._begin()
        if self.joining is None or not self.joining.open(one.asked):
            one.asked = None
        _, found = self._divergences.add(one.prompt, number=self._added)
        one.differs = _limited(one, lambda: self._differs(one, found), None)
        self._recent[self._added], self._newest[one.group] = one, self._added
        self._newest.move_to_end(one.group)
        self._added += 1
        while len(self._recent) > MOST_REMEMBERED:
            self._recent.popitem(last=False)
        while len(self._newest) > MOST_REMEMBERED:
            self._newest.popitem(last=False)

    def _differs(self, one: Request, found: Divergence | None) -> Differs | None:
        """Compare with the request before it in its session, else with the earlier prompt that has most of its text."""
        before = self._recent.get(self._newest.get(one.group, -1))
        if before is not None and (named := tuple(self._edits(before, one))):
            at = agreeing(packed(before.prompt), packed(one.prompt))
            same = found is not None and found.at == at
            return Differs(before.number, at, found.after if found is not None and same else -1, named)
        like = self._recent.get(found.like) if found is not None else None
        if found is None or like is None:
            return None
        alike = like.group == one.group
        return Differs(like.number, found.at, found.after, tuple(self._edits(like, one)), alike)

    def _edits(self, old: Request, new: Request) -> list[Edit]:
        return edits(old.body, new.body, Work(shapes=self._shapes))

    def closed(self, one: Request) -> Judged:
        judged = Judged(one, one.hit, "usage" if one.hit >= 0 else "")
        if one.seen is None:
            return judged
        if one.hit >= 0 and one.hit < one.seen.agrees and self._restarted(one.ended):
            self._forget()
            one.seen = self._log().open(_asked(one))
        answered = self._log().close(_asked(one), one.seen)
        joined = None
        if self.joining is not None and one.asked is not None:
            joined = self.joining.close_request(one.asked, _asked(one))
        if joined is not None:
            if one.hit < 0:
                judged.hit, judged.by = joined.hit, "events"
            if joined.estimate in (judged.hit, -1):
                answered = joined
        if judged.hit >= 0 and answered.hit >= 0:
            judged.causes = _diverged(answered.causes, one.differs)
        return judged

    def dropped(self, one: Request) -> None:
        """A request of which nothing was computed, or whose end was not told."""
        if self.joining is not None and one.asked is not None:
            self.joining.drop(one.asked)

    def forget(self, number: int) -> None:
        """Forget the text of a request."""
        for place in [place for place, one in self._recent.items() if one.number == number]:
            del self._recent[place]
        self._groups.forget(number)

    @property
    def late_s(self) -> float:
        """Seconds after an answer's end until what the events say of it is complete."""
        return LATE_S if self.joining is not None and self.joining.on else 0.0

    def take(self) -> list[Received]:
        """Return the events that have come. Messages of requests sent before now must be taken before `add`."""
        return self.joining.take() if self.joining is not None else []

    def add(self, batches: Sequence[Received]) -> None:
        if self.joining is not None:
            self.joining.add(batches)

    def _log(self) -> ByLog:
        if self._by_log is None:
            with contextlib.suppress(KvtuneError):
                self._scrape = self._server.scrape()
            size = self._scrape.block_size if self._scrape is not None else None
            self._by_log = ByLog(size or USUAL_BLOCK)
        return self._by_log

    def _restarted(self, now: float) -> bool:
        """Whether the server has been restarted since it was last asked."""
        if now - self._asked_at < ASK_S:
            return False
        self._asked_at = now
        before = self._scrape
        try:
            self._scrape = self._server.scrape()
        except KvtuneError:
            return False
        return before is not None and begun_anew(before, self._scrape)

    def _forget(self) -> None:
        if self._by_log is not None:
            self._by_log.anew()
        self._divergences = Divergences()
        self._recent.clear()
        self._newest.clear()

    def close(self) -> None:
        if self.joining is not None:
            self.joining.close()
        self._server.close()


class Groups:
    """Finds sessions: a request goes on with that of an earlier one whose messages it begins with.

    Else with one of the client's newest sessions, if it has at least half of that one's messages, one of them changed;
    or if it is that one's compaction. System texts do not count: they may change in a session.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str] = OrderedDict()
        """The session of each beginning that a request had as a whole."""
        self._newest: OrderedDict[str, tuple[Request, frozenset[bytes]]] = OrderedDict()
        """Of each session, its newest request and its messages."""
        self._last = 0

    def of(self, one: Request) -> str:
        messages = _messages(one)
        chain = list(accumulate(messages, lambda before, message: _hashed(before + message)))
        found = next((self._known[name] for name in reversed(chain) if name in self._known), "")
        found = found or self._changed(one, frozenset(messages))
        if not found:
            self._last += 1
            found = f"s{self._last}"
        if chain:
            self._known[chain[-1]] = found
            self._known.move_to_end(chain[-1])
        self._newest[found] = one, frozenset(messages)
        self._newest.move_to_end(found)
        for row, most in ((self._known, MOST_SESSIONS), (self._newest, MOST_REMEMBERED)):
            while len(row) > most:
                row.popitem(last=False)
        return found

    def forget(self, number: int) -> None:
        for name in [name for name, (one, _) in self._newest.items() if one.number == number]:
            del self._newest[name]

    def _changed(self, one: Request, messages: frozenset[bytes]) -> str:
        near = [
            (name, before, had)
            for name, (before, had) in reversed(self._newest.items())
            if (before.client, before.api, before.salt) == (one.client, one.api, one.salt)
        ]
        for name, before, had in near[:MOST_NEAR]:
            if len(had) >= FEWEST and 2 * len(had & messages) >= len(had):
                return name
            if len(had) >= FEWEST and any(edit.kind == "compaction" for edit in edits(before.body, one.body)):
                return name
        return ""


def _limited(one: Request, work: Callable[[], Result], otherwise: Result) -> Result:
    """Do work for a request that changes nothing until its end, and says so if it takes too long."""
    try:
        with cpu_limit(REQUEST_S):
            return work()
    except TooLongError as error:
        one.trouble = str(error)
        return otherwise


def _messages(one: Request) -> list[bytes]:
    """Return a hash of each of the request's messages but the system's; of the prompt, if it has no messages."""
    whose = f"{one.client} {one.api} {one.salt}"
    messages = one.body.get("messages", one.body.get("input"))
    if messages is None:
        return [_hashed(whose.encode(errors="replace") + packed(one.prompt))]
    if not isinstance(messages, list):
        messages = [messages]
    kept = [
        message
        for message in messages
        if not isinstance(message, dict) or message.get("role") not in ("system", "developer")
    ]
    return [
        _hashed(f"{whose} {json.dumps(_unmarked(message), sort_keys=True)}".encode(errors="replace"))
        for message in kept
    ]


def _hashed(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=16).digest()


def _unmarked(value: object) -> object:
    """Return a message for comparison: marks that move from turn to turn, such as `cache_control`, left out."""
    if isinstance(value, dict):
        return {name: _unmarked(inner) for name, inner in value.items() if name != "cache_control"}
    if isinstance(value, list) and not {dict, list}.isdisjoint(map(type, value)):
        return [_unmarked(inner) for inner in value]
    return value


def _diverged(causes: dict[str, int], differs: Differs | None) -> dict[str, int]:
    """Divide what was never seen: tokens that an earlier prompt has after a difference are `diverged`."""
    cold = causes.get("cold", 0)
    moved = min(cold, differs.after) if differs is not None else 0
    if moved <= 0:
        return causes
    divided = {**causes, DIVERGED: moved, "cold": cold - moved}
    return {cause: count for cause, count in divided.items() if count}


def _asked(one: Request, ended: float | None = None) -> Asked:
    t1 = one.ended if ended is None else ended
    return Asked(one.name, one.prompt, one.answer, one.began, t1, one.hit, one.salt, one.session)
