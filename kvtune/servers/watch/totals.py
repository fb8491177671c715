"""Divides a server's misses by cause, for the screen, records and exports alike. Pure.

In: one look after another (a look: counters and events at one moment). The server counts all misses of a prompt at
once, but their events come step by step while the prompt is computed, often in later looks. So misses wait for their
events, and events for their misses, the oldest first:

    with a cause       the events came, or cannot come any more (`tails`, `aborted`, `unknown`)
    without a cause    of prompts that are being computed (`computing`)

Blocks that a connector loads (a host tier, LMCache, NIXL) are hits, and make the same events as computed ones. If the
tier publishes what it holds, the account tells them apart (`loaded`), and the server's own count of them confirms it.
Else, from the first of them on, events do not tell causes, and misses are `unknown`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, fields

from kvtune.data.causes import RECOMPUTED
from kvtune.data.tally import Tally

SETTLE_S = 10.0
"""Seconds that misses and events wait for each other at most."""
EVENTS_S = 0.25
"""Seconds in which the events of a computed prompt come: a server that counted it may not have sent them yet."""
COMPUTING = 6
"""How much longer misses wait while the server's counters say that prompts are being computed."""


@dataclass(frozen=True, slots=True)
class Look:
    """The server's counters, and the tokens of its events by cause, at one moment.

    `hits`: tokens that were not computed; `loaded` of them by a connector. `prompts`: tokens of prompts whose first
    output token came, and `answered` the number of these prompts; None if the server does not count them. `idle`: no
    request runs or waits. `pending`: tokens of events that have no cause yet. `lost`: event batches that were lost.
    `on`: events are read. `tells`: they tell causes. `block`: tokens of the server's block; 0 if no event has told it.
    """

    at: float
    queries: int = 0
    hits: int = 0
    prompts: int | None = None
    idle: bool = False
    preemptions: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    evicted: int = 0
    lost: int = 0
    on: bool = True
    tells: bool = True
    loaded: int = 0
    pending: int = 0
    answered: int | None = None
    block: int = 0
    loads_told: bool = False
    """Whether events tell what was loaded."""


@dataclass(kw_only=True)
class Counts:
    """What was counted. `missed`: tokens whose cause is known, by cause."""

    queries: int = 0
    hits: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    evicted: int = 0
    lost: int = 0
    loaded: int = 0
    recomputed: int = 0

    @property
    def misses(self) -> int:
        return self.queries - self.hits


@dataclass
class Mark(Counts):
    """Counts at one look. `came`: tokens of events that had come by then.

    `causes`: all misses up to this look by cause; None until every one of them has a cause.
    """

    at: float = 0.0
    came: int = 0
    came_loaded: int = 0
    computing: int | None = None
    idle: bool = False
    causes: Counter[str] | None = None


@dataclass
class Totals(Counts):
    """Counts since `begin`. No count ever falls, even if the server restarts.

    Misses of a computed prompt that got no event are `tails` (parts of blocks), or `unknown` if events are off or were
    lost; those that tails cannot explain are of `aborted` requests. Tokens of events that have no miss after `settle`
    seconds were computed again after a preemption: the server does not count these as misses.
    """

    settle: float = SETTLE_S
    events_s: float = EVENTS_S
    told: bool = True
    """Whether events told all that was loaded, as the server counts it."""
    start: Mark | None = None
    """The counts at the server's last start; None if its events before the first look are not known."""
    _taken: Counter[str] = field(default_factory=Counter)
    """Tokens of events that were counted as misses or as recomputed, by cause."""
    _base: Counter[str] = field(default_factory=Counter)
    _before: Look = field(default_factory=lambda: Look(0.0))
    _uncounted: int = 0
    """Tokens that were looked up but never counted as a prompt, because their requests were aborted."""
    _tails: int = 0
    """Tokens that the tails of all answered prompts can have at most."""
    _marks: deque[Mark] = field(default_factory=deque)
    _waiting: deque[Mark] = field(default_factory=deque)

    def begin(self, look: Look, started: float | None = None) -> Mark:
        """Take the first look. `started`: the server's start, if all events since then were read; they count, too."""
        if started is None:
            self._before, self._base = look, Counter(look.tokens)
            return self._mark(look, 0)
        self.start = self._mark(Look(started), 0)
        mark = self.add(look)
        self._silent(min(self.misses - (mark.computing or 0), self.misses - look.pending), look.on, mark)
        self._again(mark.came, Counter(look.tokens))
        mark.missed, mark.recomputed = Counter(self.missed), self.recomputed
        return mark

    def anew(self, started: float = 0.0) -> Mark:
        """Begin again after a restart of the server. Misses that still wait for events get the cause `unknown`."""
        self._give("unknown", self.misses - self.missed.total())
        old = self._before
        self._before = Look(max(old.at, started), tokens=old.tokens, evicted=old.evicted, lost=old.lost)
        self._uncounted = 0
        self.start = self._mark(self._before, self._marks[-1].came)
        return self.start

    def add(self, look: Look) -> Mark:
        before, self._before = self._before, look
        asked, hit = max(0, look.queries - before.queries), max(0, look.hits - before.hits)
        self.queries += asked
        self.hits += min(hit, asked)
        self.loaded += min(hit, asked, max(0, look.loaded - before.loaded))
        self.preemptions += max(0, look.preemptions - before.preemptions)
        self.evicted += max(0, look.evicted - before.evicted)
        self.lost += max(0, look.lost - before.lost)
        came = Counter(look.tokens) - self._base
        answers = look.tokens.get("answers", 0) - before.tokens.get("answers", 0)
        if look.answered is None or not look.block:
            self._tails += asked
        else:
            self._tails += (look.block - 1) * max(0, look.answered - (before.answered or 0)) + answers
        del came["answers"]
        came_loaded = came.pop("loaded", 0)
        mark = self._mark(look, came.total())
        mark.came_loaded = came_loaded
        self.told = self.told and (not look.loaded or self._tells_loads(look, came_loaded))
        if not self.told or not look.tells:
            self._give("unknown", self.misses - self.missed.total())
            self._taken |= came
        self._judge(came)
        self._settle(came, look)
        mark.missed, mark.recomputed = Counter(self.missed), self.recomputed
        return mark

    def _tells_loads(self, look: Look, came_loaded: int) -> bool:
        """Whether what was loaded by events is what the server counts, which counts no load after a preemption."""
        old = next((mark for mark in reversed(self._marks) if mark.at <= look.at - self.settle), None)
        return look.loads_told and (
            old is None
            or (came_loaded >= old.loaded and (old.came_loaded <= self.loaded or self.preemptions > 0))
        )

    def computing(self, look: Look) -> int | None:
        """Return the tokens of prompts that are being computed; None if the server does not count prompts."""
        return None if look.prompts is None else max(0, look.queries - look.prompts - self._uncounted)

    @property
    def untold(self) -> int:
        """Missed tokens of whole blocks of which nobody knows whether they were computed before."""
        return self.missed["unknown"] + self.missed["aborted"]

    def since(self, mark: Mark) -> Tally:
        """Return the hits and misses after this mark. Misses without a cause yet are `computing`."""
        misses = Counter[str]() if mark.causes is None else self.missed - mark.causes
        if computing := self.misses - mark.misses - misses.total():
            misses["computing"] = computing
        return Tally(self.queries - mark.queries, self.hits - mark.hits, dict(misses))

    def _mark(self, look: Look, came: int) -> Mark:
        if look.prompts is not None and look.idle:
            self._uncounted = look.queries - look.prompts
        counts = {each.name: copy(getattr(self, each.name)) for each in fields(Counts)}
        made = Mark(at=look.at, came=came, computing=self.computing(look), idle=look.idle, **counts)
        if self.missed.total() == self.misses:
            made.causes = made.missed
        else:
            self._waiting.append(made)
        self._marks.append(made)
        return made

    def _give(self, cause: str, count: int) -> None:
        """Give the next `count` waiting misses this cause."""
        if count <= 0:
            return
        known = self.missed.total()
        while self._waiting and self._waiting[0].misses <= known + count:
            mark = self._waiting.popleft()
            mark.causes = Counter(self.missed)
            mark.causes[cause] += mark.misses - known
        self.missed[cause] += count

    def _judge(self, came: Mapping[str, int]) -> None:
        """Give misses the causes of the events that came; the likely causes of recomputed tokens come last."""
        room = self.misses - self.missed.total()
        for cause in sorted(came, key=lambda cause: -RECOMPUTED.index(cause)):
            more = min(room, came[cause] - self._taken[cause])
            self._taken[cause] += more
            self._give(cause, more)
            room -= more

    def _settle(self, came: Mapping[str, int], look: Look) -> None:
        """Stop waiting for the events of old misses, and for the misses of old events.

        The events of an earlier look's misses have come, except those of prompts that were being computed then.
        """
        marks = self._marks
        wait = self.settle if marks[-2].computing is None else COMPUTING * self.settle
        while len(marks) > 2 and marks[1].at <= look.at - wait:
            marks.popleft()
        old, before = marks[0], marks[-2]
        late = next((mark for mark in reversed(marks) if mark.at <= look.at - self.settle), None)
        silent = late.misses - (late.computing or 0) if late is not None else 0
        told = next((mark for mark in reversed(marks) if mark.at <= look.at - self.events_s), None)
        if told is not None and told.computing is not None:
            silent = max(silent, told.misses - told.computing)
        heard = look.on and self.lost == old.lost
        self._silent(min(silent, self.misses - look.pending) if look.on else self.misses, heard, before)
        if before.computing is not None and old.at <= look.at - wait:
            self._give("unknown", old.misses - self.missed.total())
        over = late.came if late is not None else 0
        self._again(max(over, before.came) if before.idle else over, came)

    def _silent(self, upto: int, heard: bool, mark: Mark) -> None:
        """Give a cause to the first `upto` misses, as no event will come for them.

        What the tails of the answered prompts cannot explain is of aborted requests, if the server was idle at `mark`.
        """
        count = upto - self.missed.total()
        if not heard:
            self._give("unknown", count)
            return
        tails = min(count, max(0, self._tails - self.missed["tails"])) if mark.idle else count
        self._give("tails", tails)
        self._give("aborted", count - tails)

    def _again(self, upto: int, came: Mapping[str, int]) -> None:
        """Count the first `upto` tokens of events as recomputed, except those that were counted as misses."""
        over = upto - self._taken.total()
        for cause in RECOMPUTED:
            more = max(0, min(over, came.get(cause, 0) - self._taken[cause]))
            self._taken[cause] += more
            self.recomputed += more
            over -= more
