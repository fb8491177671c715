"""Joins a server's counters with the account of its events: each of its misses gets a cause, or waits for one. Pure.

The counters have a prompt's misses after its first step, and the prompt itself with its first output token. Its events
come step by step between the two. Of a part of a block comes none. So a miss is

    explained    by an event. Events explain the oldest misses first, as servers compute prompts in their order; but
                 what no event has reached for SETTLE_S comes last: such a prompt may have broken off (`_in_order`)
    a tail       if its prompt is computed and no event is left for it: a part of a block (`_settle`)
    aborted      if its request broke off: the server is idle and nothing else explains it, or KEPT later looks have
                 misses that wait, too
    computing    if none of these is known yet

Misses wait for the server's word: a first token, or that it is idle. Only events wait for a time: those that no
counter has after SETTLE_S were computed again after a preemption, which the server counts as no miss.

Blocks that a connector loads (a host tier, LMCache, NIXL) are hits, and make the same events as computed ones. If the
tier publishes what it holds, the account tells them apart (`loaded`), and the server's own count of them confirms it.
Else, from the first of them on, events do not tell causes, and misses are `unknown`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtune.data.causes import RECOMPUTED
from kvtune.data.tally import Tally
from kvtune.servers.watch.counts import Counts

SETTLE_S = 10.0
"""Seconds that events wait for their misses; and misses for events, if the server does not count prompts."""
HEARD_S = 0.25
"""Seconds in which an event comes: a server that counted a prompt may not have sent its events yet."""
KEPT = 500
"""Most looks whose misses wait for a cause."""


@dataclass(frozen=True, slots=True)
class Look:
    """The server's counters, and the tokens of its events by cause, at one moment.

    `hits`: tokens that were not computed; `loaded` of them by a connector. `prompts`: tokens of prompts whose first
    output token came, and `answered` the number of these prompts; None if the server does not count them. `idle`: no
    request runs or waits. `pending`: tokens of events that have no cause yet. `lost`: event batches that were lost.
    `on`: events are read. `tells`: they tell causes, and `loads_told`: what was loaded. `block`: tokens of the server's
    block; 0 if no event has told it.
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


@dataclass(slots=True)
class Lot:
    """The misses that came with one look, and the causes that they have got since."""

    misses: int
    causes: Counter[str] = field(default_factory=Counter)

    @property
    def waiting(self) -> int:
        return self.misses - self.causes.total()


@dataclass(slots=True)
class Mark:
    """The counts at one look. `waited`: the misses up to it that had no cause then.

    `computing`: tokens of prompts without a first output token; None if the server does not tell. `came`,
    `came_loaded`: tokens of events by then. `left`: misses that still waited when the look was counted.
    """

    at: float = 0.0
    counts: Counts = field(default_factory=Counts)
    waited: tuple[Lot, ...] = ()
    left: int = 0
    computing: int | None = None
    idle: bool = False
    came: int = 0
    came_loaded: int = 0

    @property
    def causes(self) -> Counter[str]:
        """The misses up to this look by cause, also those that got their cause later."""
        return sum((lot.causes for lot in self.waited), self.counts.missed.copy())


@dataclass
class Totals(Counts):
    """Counts since `begin`. No count ever falls, even if the server restarts."""

    settle: float = SETTLE_S
    heard: float = HEARD_S
    told: bool = True
    """Whether events told all that was loaded, as the server counts it."""
    start: Mark | None = None
    """The counts at the server's last start; None if its events before the first look are not known."""
    _base: Counter[str] = field(default_factory=Counter)
    """Tokens of events before the first look."""
    _taken: Counter[str] = field(default_factory=Counter)
    """Tokens of events that were counted as misses or as recomputed, by cause."""
    _before: Look = field(default_factory=lambda: Look(0.0))
    _uncounted: int = 0
    """Tokens that were looked up but never counted as a prompt, because their requests broke off."""
    _tails: int = 0
    """Tokens that the tails of all answered prompts can have at most."""
    _single: int = 0
    """Tokens of the last look's blocks that may be an answer's, or in place of a tail."""
    _waiting: deque[Lot] = field(default_factory=deque)
    _marks: deque[Mark] = field(default_factory=deque)
    """Those of the looks since SETTLE_S, and the last one before."""

    def begin(self, look: Look, started: float | None = None) -> Mark:
        """Take the first look. `started`: the server's start, if all events since then were read; they count, too."""
        if started is None:
            self._before, self._base = look, Counter(look.tokens)
            return self._mark(look, Counter())
        self.start = self._mark(Look(started), Counter())
        return self.add(look, settled=True)

    def anew(self, started: float = 0.0) -> Mark:
        """Begin again after a restart of the server. Misses that still wait for events get the cause `unknown`."""
        self._give("unknown", self.unexplained)
        old = self._before
        self._before = Look(max(old.at, started), tokens=old.tokens, evicted=old.evicted, lost=old.lost)
        self._uncounted = 0
        self.start = self._mark(self._before, Counter(old.tokens) - self._base)
        return self.start

    def add(self, look: Look, *, settled: bool = False) -> Mark:
        """Take a look. `settled`: no event is on its way any more."""
        self._count(look)
        came = Counter(look.tokens) - self._base
        mark = self._mark(look, came)
        for no_miss in ("answers", "loaded"):
            del came[no_miss]
        self.told = self.told and (not look.loaded or self._tells_loads(look, mark))
        if not self.told or not look.tells:
            self._give("unknown", self.unexplained)
            self._taken |= came
        for cause in sorted(
            came, key=RECOMPUTED.index, reverse=True
        ):  # those that may be recomputed come last
            self._give(cause, self._take(cause, came, self.unexplained))
        self._settle(look, came, settled)
        while len(self._waiting) > KEPT:
            lot = self._waiting.popleft()
            self._explain(lot, "aborted", lot.waiting)
        if look.idle and self._marks[-2].idle and not self.unexplained:  # all tails are known by now
            self._tails = self.missed["tails"] + self._single
        mark.counts.recomputed, mark.left = self.recomputed, self.unexplained
        return mark

    def computing(self, look: Look) -> int | None:
        """Return the tokens of prompts that are being computed; None if the server does not count prompts."""
        return None if look.prompts is None else max(0, look.queries - look.prompts - self._uncounted)

    def since(self, mark: Mark) -> Tally:
        """Return the hits and misses after this mark. Misses without a cause yet are `computing`."""
        misses = self.missed - mark.causes
        if computing := self.misses - mark.counts.misses - misses.total():
            misses["computing"] = computing
        return Tally(self.queries - mark.counts.queries, self.hits - mark.counts.hits, dict(misses))

    def _count(self, look: Look) -> None:
        """Add what the counters grew by."""
        before, self._before = self._before, look
        asked, hit = max(0, look.queries - before.queries), max(0, look.hits - before.hits)
        hit = min(hit, asked)
        self.queries += asked
        self.hits += hit
        self.loaded += min(hit, max(0, look.loaded - before.loaded))
        self.preemptions += max(0, look.preemptions - before.preemptions)
        self.evicted += max(0, look.evicted - before.evicted)
        self.lost += max(0, look.lost - before.lost)
        if look.answered is None or look.prompts is None or not look.block:
            self._tails += asked
        elif (count := max(0, look.answered - (before.answered or 0))) > 0:
            # The lengths of the prompts tell what their tails add up to, but for whole blocks.
            rest = max(0, look.prompts - (before.prompts or 0)) % look.block
            self._tails += rest + (count * (look.block - 1) - rest) // look.block * look.block
        self._single = look.tokens.get("answers", 0) - before.tokens.get("answers", 0)
        self._tails += self._single
        if asked > hit:
            self._waiting.append(Lot(asked - hit))

    def _mark(self, look: Look, came: Counter[str]) -> Mark:
        if look.prompts is not None and look.idle:
            self._uncounted = look.queries - look.prompts
        closed = self.missed - sum((each.causes for each in self._waiting), Counter[str]())
        mark = Mark(look.at, self.copied(), tuple(self._waiting), self.unexplained)
        mark.counts.missed = closed
        mark.computing, mark.idle = self.computing(look), look.idle
        mark.came, mark.came_loaded = came.total() - came["answers"] - came["loaded"], came["loaded"]
        self._marks.append(mark)
        while len(self._marks) > 2 and self._marks[1].at <= look.at - self.settle:
            self._marks.popleft()
        return mark

    def _earlier(self, look: Look, seconds: float) -> Mark | None:
        """Return the newest mark that is at least this much older than a look."""
        return next((mark for mark in reversed(self._marks) if mark.at <= look.at - seconds), None)

    def _tells_loads(self, look: Look, now: Mark) -> bool:
        """Whether what was loaded by events is what the server counts, which counts no load after a preemption."""
        old = self._earlier(look, self.settle)
        return look.loads_told and (
            old is None
            or (
                now.came_loaded >= old.counts.loaded
                and (old.came_loaded <= self.loaded or self.preemptions > 0)
            )
        )

    def _settle(self, look: Look, came: Counter[str], settled: bool) -> None:
        """Stop waiting for events that will not come, and for the misses of events that no counter will have."""
        late, before = self._earlier(look, self.settle), self._marks[-2]
        heard = self._marks[-1] if settled else self._earlier(look, self.heard)
        if heard is None or heard.computing is None:
            heard = late
        # Of the prompts that are computed, all events are here; those that are not judged yet have no cause.
        whole = 0 if heard is None else heard.counts.misses - (heard.computing or 0) - look.pending
        silent = whole - self.missed.total()
        if not look.on:
            self._give("unknown", self.unexplained)
        elif self.lost > self._marks[0].counts.lost:
            self._give("unknown", silent)
        else:
            tails = max(0, min(silent, self._tails - self.missed["tails"]))
            self._give("tails", tails)
            if before.idle:
                self._give("aborted", silent - tails)
        over = before if before.idle else late
        if settled:
            over = self._marks[-1]
        for cause in RECOMPUTED:
            most = over.came - self._taken.total() if over is not None else 0
            self.recomputed += self._take(cause, came, most)

    def _take(self, cause: str, came: Counter[str], most: int) -> int:
        """Use up to `most` tokens of the events of a cause. Return how many."""
        count = max(0, min(most, came[cause] - self._taken[cause]))
        self._taken[cause] += count
        return count

    def _give(self, cause: str, count: int) -> None:
        """Give `count` misses that wait this cause."""
        for lot, room in self._in_order() if count > 0 else ():
            self._explain(lot, cause, min(count, room))
            count -= min(count, room)
        self._waiting = deque(lot for lot in self._waiting if lot.waiting)

    def _explain(self, lot: Lot, cause: str, count: int) -> None:
        lot.causes[cause] += count
        self.missed[cause] += count

    def _in_order(self) -> list[tuple[Lot, int]]:
        """Return the lots that wait, and how many of their misses: the oldest first, but for those that come last.

        As many as have waited at each look since SETTLE_S got no event meanwhile: they come last, the newest first.
        """
        last = min((mark.left for mark in self._marks), default=0)
        first, after = [], []
        for lot in self._waiting:
            left = min(last, lot.waiting)
            last -= left
            first.append((lot, lot.waiting - left))
            after.append((lot, left))
        return first + after[::-1]
