"""Watches several servers behind a router as one account: what each hit, and what another of them had.

In: the `Addresses` of the servers, which may come and go. Out: a `FleetSnapshot`. Each server has its `Watching`; the
events of all are counted in the order of their times, by the servers' clocks. Servers of one model are compared, block
by block, by content. A server that is down, or whose events have a gap, holds nothing that a router could have used.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.run.extras import ServerShare
from kvtune.data.run.funnel import Funnel, Range
from kvtune.data.run.ranges import Number
from kvtune.servers.watch.addresses import Addresses
from kvtune.servers.watch.blocks import Blocks
from kvtune.servers.watch.cache import MOST_HELD_BYTES
from kvtune.servers.watch.endpoints import Named
from kvtune.servers.watch.events import Received
from kvtune.servers.watch.others import Others
from kvtune.servers.watch.watching import Snapshot, Watching

REREAD_S = 10.0
"""Seconds between two questions for the servers' addresses."""
AGAIN_S = 5.0
"""Seconds until a server that did not answer is asked again: a question may take as long."""

LATE_S = 0.1
"""Seconds after which the events have come that any server had published before: half of it is the reader's."""
EVENTS_S = 1.0
"""As in servers/watch/totals.py: events are counted before the servers are looked at, one after another."""
FLEET_BYTES = 1 << 30
"""Memory for the blocks of all servers: beyond its share of it a server's account forgets what was evicted first."""
SILENT_S = 10.0
"""Seconds after which a server that computes more than parts of blocks, without an event, publishes no more."""


class FleetSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """`fleet`: of the servers of one `model`, since each one's `since`. `snapshots`: of the servers that answer."""

    at: Number
    model: str
    fleet: Funnel
    servers: list[ServerShare]
    notes: list[str]
    snapshots: dict[str, Snapshot]


class Watcher(Protocol):
    def __call__(self, url: str, named: Named) -> Watching: ...


@dataclass
class Member:
    """One server. `lost_at`, `silent_at`: since when batches of its events are missing, or no more come.

    `counts`: of its account now; `begun`: at its first look, or nothing at its start.
    """

    url: str
    watching: Watching
    others: Others
    history: bool
    listens: bool = False
    """Whether its addresses of events were asked for."""
    shot: Snapshot | None = None
    down_since: float | None = None
    due: float = 0.0
    lost_at: float | None = None
    silent_at: float | None = None
    since: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    begun: Counter[str] = field(default_factory=Counter)
    _last: tuple[int, float, int, int] = (-1, 0.0, 0, 0)
    """When a batch last came: the ranks' numbers, the time, the misses and requests by then."""

    @property
    def model(self) -> str:
        return self.watching.model

    @property
    def gap(self) -> float | None:
        """Since when its events do not tell what it holds."""
        return self.lost_at or self.silent_at

    @property
    def heard(self) -> bool:
        return self.shot is not None and self.shot.events.state == "on"

    @property
    def whole(self) -> bool:
        """Whether all events since its start were read."""
        events = self.watching.events
        return events.state == "on" and events.complete and not self.gap

    @property
    def forgotten(self) -> int:
        """The evicted blocks that its account has forgotten."""
        return sum(blocks.forgotten for blocks in self.watching.account.blocks.values())

    @property
    def told(self) -> bool:
        """Whether its events tell what was computed: those of loaded blocks, and of parts of blocks, do not."""
        return self.shot is None or (self.watching.totals.told and not self.watching.match_unit)

    def look(self) -> None:
        """Look at it; it is down if it does not answer."""
        now, restarts = time.time(), self.watching.restarts
        if now < self.due:
            return
        try:
            if not self.listens:
                self.watching.listen()
                self.listens = True
                return
            if self.shot is None:
                self.watching.begin()
            self.shot = self.watching.look()
        except UsageError:
            raise
        except KvtuneError:
            self.down_since = self.down_since or (self.shot.at if self.shot is not None else now)
            self.due = now + AGAIN_S
            return
        self.down_since = None
        if self.watching.restarts > restarts:
            self.lost_at = None  # of a life that has ended
        self._count(self.shot, self._heed(self.shot, now))

    def _heed(self, shot: Snapshot, now: float) -> int:
        """Note whether its events have a gap. Return the tokens that it computed without an event meanwhile."""
        lost = shot.events.lost_batches + shot.events.unknown_messages
        if lost > self.counts["lost"]:
            self.lost_at = self.lost_at or now
        self.counts["lost"] = lost
        reader, misses = self.watching.reader, self.watching.totals.misses
        number = sum(stream.last for stream in reader.streams.values()) if reader is not None else -1
        requests = self.counts["requests"] + (shot.running or 0)
        if number != self._last[0] or not self._last[1]:
            self._last, self.silent_at = (number, now, misses, requests), None
        _, at, before, asked = self._last
        if (
            self.heard
            and now > at + SILENT_S
            and misses - before > (shot.block_size or 1) * (requests - asked)
        ):
            self.silent_at = at
        return misses - before if self.silent_at else 0

    def _count(self, shot: Snapshot, blind: int) -> None:
        totals, others, told = self.watching.totals, self.others, self.told
        requests = shot.requests or 0
        came = requests - self.counts["answered"]  # the counter falls when the server starts anew
        self.counts = Counter(
            queries=totals.queries,
            hits=totals.hits,
            open=totals.unexplained,
            vague=totals.untold,
            recomputed=totals.recomputed,
            evicted=totals.evicted,
            answered=requests,
            requests=self.counts["requests"] + (came if came >= 0 else requests),
            lost=self.counts["lost"],
            blind=max(blind, self.counts["blind"]),
            still=others.still,
            held0=others.held.least * told,
            held1=others.held.most * told,
            kept0=others.kept.least * told,
            kept1=others.kept.most * told,
            **{f"cause {cause}": tokens for cause, tokens in totals.missed.items()},
        )
        if not self.since and self.history and self.whole and totals.start is not None:
            self.since = totals.start.at
        elif not self.since:
            self.since, self.begun = time.time(), Counter(self.counts)

    @property
    def gained(self) -> Counter[str]:
        """What was counted since its first look."""
        return Counter({name: max(0, count - self.begun[name]) for name, count in self.counts.items()})


@dataclass
class Fleet:
    """`watcher` makes the `Watching` of a server. `start`, `look`, `close` as a `Watching` has them."""

    addresses: Addresses
    watcher: Watcher
    history: bool = True
    """Whether a server's counts begin at its start, where all events since then were read; else at its first look."""
    members: dict[str, Member] = field(default_factory=dict)
    gone: dict[str, Counter[str]] = field(default_factory=dict)
    """By model, what was counted of servers that are no longer named."""
    _read: float = 0.0
    _waiting: list[tuple[Member, Received]] = field(default_factory=list)
    """Batches that are still to be counted."""
    _cold: int = 0
    """Tokens never seen, at the last look at which no server's blocks had been forgotten."""
    _forgot: bool = False

    def start(self) -> None:
        self._follow()
        self._look()
        if not any(member.listens for member in self.members.values()):
            names = ", ".join(self.members)
            raise KvtuneError(
                f"no server answers at {names}", "check the addresses, and that the servers run"
            )

    def close(self) -> None:
        for member in self.members.values():
            member.watching.close()

    def look(self) -> FleetSnapshot:
        if time.time() >= self._read + REREAD_S:
            self._follow()
        self._look()
        return self.snapshot()

    def _follow(self) -> None:
        """Take servers that are new, and let go those that are no longer named."""
        self._read = time.time()
        named = self.addresses.read()
        for url in [url for url in self.members if url not in named]:
            member = self.members.pop(url)
            member.watching.close()
            self.gone[member.model] = self.gone.get(member.model, Counter()) + member.gained
        for url in [url for url in named if url not in self.members]:
            watching = self.watcher(url, named[url])
            others = Others(partial(self.beside, url))
            watching.account.others, watching.alone = others, False
            watching.account.by_content = True
            watching.totals.heard = EVENTS_S
            self.members[url] = Member(url, watching, others, self.history)
        for member in self.members.values():
            member.watching.account.most_bytes = min(MOST_HELD_BYTES, FLEET_BYTES // len(self.members))

    def _look(self) -> None:
        for member in [member for member in self.members.values() if not member.listens]:
            member.look()
        self._compare()
        self._count()  # the histories of all that are new, too
        for member in [member for member in self.members.values() if member.listens]:
            member.look()
        self._compare()

    def _compare(self) -> None:
        for member in self.members.values():
            model = [
                other
                for other in self.members.values()
                if other is not member and other.model == member.model
            ]
            member.others.known = all(other.whole for other in model)

    def _count(self) -> None:
        """Count the events of all servers in the order of their times.

        What one server sent before another's newest event may come a little later: it is waited for.
        """
        self._take()
        until = max((received.batch.ts for _, received in self._waiting), default=0.0)
        if len(self.members) > 1 and self._waiting:
            time.sleep(LATE_S)
            self._take()
        self._waiting.sort(key=lambda row: row[1].batch.ts)
        count = bisect_right(self._waiting, until, key=lambda row: row[1].batch.ts)
        for member, received in self._waiting[:count]:
            member.watching.count([received])
        del self._waiting[:count]

    def _take(self) -> None:
        for member in self.members.values():
            self._waiting += [(member, received) for received in member.watching.came()]

    def beside(self, url: str) -> list[tuple[Blocks, bool]]:
        """Return the blocks of the other servers of its model, each with whether a router could have used them."""
        own = self.members.get(url)
        return [
            (blocks, member.down_since is None and not member.gap)
            for member in self.members.values()
            if own is not None and member is not own and member.model == own.model
            for blocks in member.watching.account.blocks.values()
        ]

    @property
    def model(self) -> str:
        """The model of most servers; of several, the one that is named first."""
        models = [member.model for member in self.members.values() if member.listens]
        return max(models, key=models.count, default="")

    def snapshot(self) -> FleetSnapshot:
        model = self.model
        compared = [member for member in self.members.values() if member.listens and member.model == model]
        counts = sum((member.gained for member in compared), Counter(self.gone.get(model, Counter())))
        sizes = {member.url: member.shot.block_size or 0 for member in compared if member.shot is not None}
        for (
            member
        ) in compared:  # of a prompt's last part-block, only a server with smaller blocks may have some
            part = sizes.get(member.url, 0) - min(filter(None, sizes.values()), default=0)
            counts["vague"] += max(0, part) * member.gained["requests"]
        self._forgot = self._forgot or any(member.forgotten for member in compared)
        if not self._forgot:
            self._cold = counts["cause cold"]
        counts["forgotten"] = max(0, counts["cause cold"] - self._cold)
        return FleetSnapshot(
            at=time.time(),
            model=model,
            fleet=_funnel(counts),
            servers=[self._share(member, model) for member in self.members.values()],
            notes=self._notes(compared),
            snapshots={
                url: member.shot
                for url, member in self.members.items()
                if member.shot is not None and member.down_since is None
            },
        )

    def _share(self, member: Member, model: str) -> ServerShare:
        counts, shot, others = member.gained, member.shot, member.others
        misses = {
            name.removeprefix("cause "): tokens
            for name, tokens in counts.items()
            if name.startswith("cause ")
        }
        misses = {cause: tokens for cause, tokens in misses.items() if tokens}
        missed = counts["queries"] - counts["hits"]
        if not member.heard:
            misses = {}
        elif open_ := missed - sum(misses.values()):
            misses["computing"] = max(0, open_)
        return ServerShare(
            counts["queries"],
            counts["hits"],
            misses,
            url=member.url,
            since=member.since,
            model=member.model,
            why=_why(member, model),
            down_since=member.down_since,
            requests=counts["requests"],
            evicted_blocks=counts["evicted"],
            pool_use=shot.pool_use if shot is not None and member.down_since is None else None,
            pool_blocks=shot.pool_blocks if shot is not None else None,
            block_size=shot.block_size if shot is not None else None,
            still_tokens=counts["still"],
            still_s=statistics.median(others.ages) if others.ages else None,
        )

    def _notes(self, compared: Sequence[Member]) -> list[str]:
        notes = (
            [f"the file of servers was not read again: {self.addresses.problem}"]
            if self.addresses.problem
            else []
        )
        sizes = sorted({member.shot.block_size or 0 for member in compared if member.shot is not None} - {0})
        if len(sizes) > 1:
            words = " and ".join(map(str, sizes))
            notes.append(
                f"servers have blocks of {words} tokens: whole blocks of each are compared by their token ids"
            )
        versions = sorted({member.shot.vllm for member in compared if member.shot is not None} - {""})
        if len(versions) > 1:
            notes.append(
                f"servers run vLLM {' and '.join(versions)}: images and adapters may be named differently"
            )
        if self._forgot:
            forgotten = sum(member.forgotten for member in compared)
            notes.append(
                f"{forgotten:,} blocks that were evicted long ago were forgotten (all servers' take up to "
                f"{FLEET_BYTES >> 20:,} MiB): they count as never seen, and `everything kept` reaches as far as these"
            )
        if self.gone:
            notes.append("servers that are no longer named are in the sums, and in no row")
        return notes


def _why(member: Member, model: str) -> str:
    """Return in words what is not known of a server, or why it is compared with none."""
    if not member.listens:
        return "it has not answered yet"
    if member.model != model:
        return f"another model ({member.model}): it is in no sum"
    since = f"since {_clock(member.gap)}" if member.gap else ""
    if member.shot is None:
        return "it has not answered yet"
    events = member.shot.events
    if events.state != "on":
        return f"its events are {events.state}: what it holds is not known"
    if since:
        return f"its events have a gap {since}: what it holds since then is not known"
    if not events.complete:
        return "it was joined late: what it had computed before is not known"
    return (
        ""
        if member.told
        else "a connector that does not tell what it loads, or --prefix-match-unit: its misses have no cause"
    )


def _clock(at: float | None) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _funnel(counts: Counter[str]) -> Funnel:
    asked, hits = counts["queries"], min(counts["hits"], counts["queries"])
    vague = counts["vague"] + counts["open"] + counts["blind"]

    def bound(name: str, least: int, more: int = 0) -> Range:
        low = max(least, hits + counts[f"{name}0"] - counts["recomputed"])
        high = max(low, hits + counts[f"{name}1"] + vague + more)
        return Range(min(low, asked), min(high, asked))

    best = bound("held", hits)
    everything = bound("kept", best.least, counts["forgotten"])
    most = max(everything.most, best.most)
    return Funnel(
        prompt_tokens=asked, as_routed=hits, best_replica=best, everything=Range(everything.least, most)
    )
