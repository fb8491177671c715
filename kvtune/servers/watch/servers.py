"""Watches a list of servers as one account: what each hit, and what another of them had. One is a list of one.

In: the `Addresses` of the servers, which may come and go. Out: a `Snapshot` of one, a `FleetSnapshot` of several.
The events of all are counted in the order of their times, by the servers' clocks. Servers of one model are compared,
block by block, by content. A server that is down, or whose events have a gap, holds nothing that a router could use.

A member is its life, known by its start and not by its address: under two names it is one member, and what it counted
before it left the list is not counted again when it comes back.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.causes import OTHER_REPLICA, UNSEEN
from kvtune.data.run.extras import ServerShare
from kvtune.data.run.funnel import Funnel, Range
from kvtune.data.run.ranges import Number
from kvtune.servers.watch.addresses import Addresses
from kvtune.servers.watch.blocks import Blocks
from kvtune.servers.watch.cache import MOST_HELD_BYTES
from kvtune.servers.watch.counts import Bounds, Counts
from kvtune.servers.watch.endpoints import Named
from kvtune.servers.watch.events import Received
from kvtune.servers.watch.metrics import Scrape, same_life
from kvtune.servers.watch.others import Others
from kvtune.servers.watch.snapshot import Snapshot
from kvtune.servers.watch.watched import Watched

REREAD_S = 10.0
"""Seconds between two questions for the servers' addresses."""
AGAIN_S = 5.0
"""Seconds until one of several servers that did not answer is asked again: a question may take as long."""
WHOLE_S = 60.0
"""Seconds for asking those that have not answered yet: the others are asked at the next look."""
LATE_S = 0.1
"""Seconds after which the events have come that any server had published before: half of it is the reader's."""
FLEET_BYTES, MOST_FLEET_BYTES = 1 << 30, 4 << 30
"""Memory for the blocks of all servers: beyond its share of it a server's account forgets what was evicted first. If
what is not evicted takes the most, that server's events are read no further that takes most of it."""
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
    """Makes what watches a server. `others`: the other servers of the list; None if there are none."""

    def __call__(self, url: str, named: Named, others: Others | None) -> Watched: ...


@dataclass(slots=True)
class Hearing:
    """Since when batches of a server's events are missing (`lost_at`), or no more come (`silent_at`)."""

    lost_at: float | None = None
    silent_at: float | None = None
    lost: int = 0
    batches: int = -1
    """The numbers of the ranks' last batches; below: the moment when they came, and what was counted by then."""
    at: float = 0.0
    misses: int = 0
    requests: int = 0

    @property
    def gap(self) -> float | None:
        """Since when its events do not tell what it holds."""
        return self.lost_at or self.silent_at

    def heed(self, shot: Snapshot, batches: int, counts: Counts, now: float) -> int:
        """Take what a look saw. Return the tokens that were computed without an event since events stopped."""
        lost = shot.events.lost_batches + shot.events.unknown_messages
        if lost > self.lost:
            self.lost_at = self.lost_at or now
        self.lost = lost
        requests = counts.requests + (shot.running or 0)
        if batches != self.batches or not self.at:
            self.batches, self.at, self.misses, self.requests = batches, now, counts.misses, requests
            self.silent_at = None
        blind, parts = counts.misses - self.misses, (shot.block_size or 1) * (requests - self.requests)
        if shot.events.state == "on" and now > self.at + SILENT_S and blind > parts:
            self.silent_at = self.at
        return blind if self.silent_at else 0


@dataclass
class Member:
    """A server of the list. `begun`: its counts at its first look here, or none at its start.

    `error`: of its last look. `since`: when its counts begin. `same_as`: the member that it is under another name.
    """

    url: str
    watched: Watched
    history: bool
    others: Others | None = None
    listens: bool = False
    """Whether its addresses of events were asked for."""
    shot: Snapshot | None = None
    down_since: float | None = None
    error: KvtuneError | None = None
    due: float = 0.0
    since: float = 0.0
    same_as: str = ""
    hearing: Hearing = field(default_factory=Hearing)
    counts: Counts = field(default_factory=Counts)
    begun: Counts = field(default_factory=Counts)
    unsure: int = 0
    """Tokens that were missed while it was not known that a server had ended."""
    _answered: int = 0
    _blind: int = 0

    @property
    def model(self) -> str:
        return self.watched.model

    @property
    def place(self) -> list[str]:
        """The ports at which the server publishes its events, or, without events, the one that it serves at."""
        sources = self.watched.reader.sources.values() if self.watched.reader is not None else ()
        return [source.endpoint.rpartition(":")[2] for source in sources] or [self.url.rpartition(":")[2]]

    @property
    def gap(self) -> float | None:
        return self.hearing.gap

    @property
    def heard(self) -> bool:
        return self.shot is not None and self.shot.events.state == "on"

    @property
    def whole(self) -> bool:
        """Whether all events since its start were read."""
        events = self.watched.events
        return events.state == "on" and events.complete and not self.gap

    @property
    def told(self) -> bool:
        """Whether its events tell what was computed: those of loaded blocks, and of parts of blocks, do not."""
        return self.shot is None or self.watched.told

    @property
    def gained(self) -> Counts:
        """What was counted since its first look here."""
        return self.counts - self.begun

    def look(self) -> bool:
        """Look at it; it is down if it does not answer. Return whether it has ended since the last look."""
        now, restarts = time.time(), self.watched.restarts
        if now < self.due:
            return False
        try:
            if not self.listens:
                self.watched.listen()
                self.listens, self.error = True, None
                return False
            if self.shot is None:
                self.watched.begin()
                self.shot = self.watched.snapshot()
            else:
                self.shot = self.watched.look()
        except UsageError:
            raise
        except KvtuneError as error:
            ended = self.down_since is None and self.shot is not None
            self.down_since = self.down_since or (self.shot.at if self.shot is not None else now)
            self.due, self.error = now + AGAIN_S * (self.others is not None), error
            return ended
        self.down_since = self.error = None
        anew = self.watched.restarts > restarts
        if anew:
            self.hearing.lost_at = None  # of a life that has ended
        self._count(self.shot, now)
        return anew

    def _count(self, shot: Snapshot, now: float) -> None:
        totals, others, tells = self.watched.totals, self.others or Others(list), self.told
        came = (shot.requests or 0) - self._answered  # the counter falls when the server starts anew
        self._answered = shot.requests or 0
        reader = self.watched.reader
        batches = sum(stream.last for stream in reader.streams.values()) if reader is not None else -1
        counts = totals.copied(
            requests=self.counts.requests + (came if came >= 0 else self._answered),
            held=others.held if tells else Bounds(),
            kept=others.kept if tells else Bounds(),
            still=others.still,
        )
        self._blind = max(self._blind, self.hearing.heed(shot, batches, counts, now))
        counts.blind = self._blind + self.unsure
        self.counts = counts
        if not self.since and self.history and self.whole and totals.start is not None:
            self.since = totals.start.at
        elif not self.since:
            self.since, self.begun = time.time(), counts


@dataclass
class Servers:
    """`start`, `look`, `close`. `watcher` makes what watches a server.

    `history`: whether a server's counts begin at its start, where all events since then were read; else at its first
    look here.
    """

    addresses: Addresses
    watcher: Watcher
    history: bool = True
    members: dict[str, Member] = field(default_factory=dict)
    gone: dict[str, Counts] = field(default_factory=dict)
    """What was counted of servers that are no longer named, by model."""
    _left: list[tuple[Scrape, list[str]]] = field(default_factory=list)
    """The last scrape and the place of each server in `gone`."""
    _read: float = 0.0
    _waiting: list[tuple[Member, Received]] = field(default_factory=list)
    """Batches that are still to be counted."""
    _unseen: int = 0
    """Tokens never seen, at the last look at which no server's blocks had been forgotten."""
    _forgot: bool = False

    def __post_init__(self) -> None:
        self.alone = bool(self.addresses.only)

    @property
    def only(self) -> Member:
        """The member of a list of one."""
        return next(iter(self.members.values()))

    def start(self) -> None:
        self._follow()
        self._look()
        if not any(member.listens for member in self.members.values()):
            raise KvtuneError(
                f"no server answers at {', '.join(self.members)}",
                "check the addresses, and that the servers run",
            )

    def close(self) -> None:
        for member in self.members.values():
            member.watched.close()

    def look(self) -> Snapshot | FleetSnapshot:
        """Look at all. KvtuneError if there is one server, and it does not answer."""
        if time.time() >= self._read + REREAD_S:
            self._follow()
        self._look()
        return self.snapshot()

    def _follow(self) -> None:
        """Take servers that are new, and let go those that are no longer named."""
        self._read = time.time()
        named = self.addresses.read()
        for url in [url for url in self.members if url not in named]:
            self._let_go(self.members.pop(url))
        for url in [url for url in named if url not in self.members]:
            others = None if self.alone else Others(partial(self.beside, url))
            watched = self.watcher(url, named[url], others)
            self.members[url] = Member(url, watched, self.history, others)
        for member in self.members.values():
            member.watched.account.most_bytes = min(MOST_HELD_BYTES, FLEET_BYTES // len(self.members))

    def _let_go(self, member: Member) -> None:
        """Keep what a member counted, and its start. Another name of the same server begins as a new member."""
        member.watched.close()
        if not member.same_as:
            self.gone[member.model] = self.gone.get(member.model, Counts()) + member.gained
            if member.shot is not None:
                self._left.append((member.watched.scrape, member.place))
        for url in [each.url for each in self.members.values() if each.same_as == member.url]:
            del self.members[url]
            self._read = 0.0

    def _look(self) -> None:
        end = time.monotonic() + WHOLE_S
        fresh = [member for member in self.members.values() if not member.listens]
        for number, member in enumerate(sorted(fresh, key=lambda member: member.due)):
            if number and time.monotonic() > end:  # the others at the next look
                break
            member.look()
            if member.listens:
                member.same_as = self._same_as(member)
                now = member.watched.joined
                member.history &= not any(
                    now is not None and place == member.place and same_life(last, now, now)
                    for last, place in self._left
                )
        self._compare()
        self._count()  # the histories of all that are new, too
        before = {member.url: member.counts for member in self._own}
        ended = [member.look() for member in self._own if member.listens]
        if any(ended):  # what it held until then, and what the next one holds, is not told to the moment
            for member in self._own:
                member.unsure += (member.counts - before[member.url]).misses
        self._compare()
        if self.alone and self.only.error is not None:
            raise self.only.error

    @property
    def _own(self) -> list[Member]:
        """The members without other names of them."""
        return [member for member in self.members.values() if not member.same_as]

    def _same_as(self, member: Member) -> str:
        """Return the URL of the member that is this new one under another name; "" if none is."""
        for other in self._own:
            if other is member or not other.listens or other.model != member.model:
                continue
            if member.place != other.place:
                continue
            with suppress(KvtuneError):
                if same_life(*(each.watched.server.scrape() for each in (other, member, other))):
                    member.watched.close()
                    return other.url
        return ""

    def _compare(self) -> None:
        """Note of each server whether all is known of the others: what one had computed that never answered is not."""
        for member in self._own:
            if member.others is not None:
                beside = [
                    other for other in self._own if other is not member and other.model in (member.model, "")
                ]
                member.others.known = all(other.whole for other in beside)

    def _count(self) -> None:
        """Count the events of all servers in the order of their times.

        What one server sent before another's newest event may come a little later: it is waited for.
        """
        if self.alone:
            return
        self._take()
        until = max((received.batch.ts for _, received in self._waiting), default=0.0)
        if len(self.members) > 1 and self._waiting:
            time.sleep(LATE_S)
            self._take()
        self._waiting.sort(key=lambda row: row[1].batch.ts)
        count = bisect_right(self._waiting, until, key=lambda row: row[1].batch.ts)
        for member, received in self._waiting[:count]:
            member.watched.count([received])
        del self._waiting[:count]
        held = {member.url: member.watched.account.held_bytes for member in self._own}
        if sum(held.values()) > MOST_FLEET_BYTES:
            self.members[max(held, key=held.__getitem__)].watched.stop(
                "all servers' say that more blocks are cached than kvtune keeps in memory, its own most"
            )

    def _take(self) -> None:
        for member in self._own:
            self._waiting += [(member, received) for received in member.watched.came()]

    def beside(self, url: str) -> list[tuple[Blocks, bool]]:
        """Return the blocks of the other servers of its model, each with whether a router could have used them."""
        own = self.members.get(url)
        return [
            (blocks, member.down_since is None and not member.gap)
            for member in self._own
            if own is not None and member is not own and member.model == own.model
            for blocks in member.watched.account.blocks.values()
        ]

    @property
    def model(self) -> str:
        """The model of most servers; of several, the one that is named first."""
        models = [member.model for member in self._own if member.listens]
        return max(models, key=models.count, default="")

    def compared(self) -> list[Member]:
        """Return the members whose sums are one."""
        model = self.model
        return [member for member in self._own if member.listens and member.model == model]

    def snapshot(self) -> Snapshot | FleetSnapshot:
        if self.alone:
            assert self.only.shot is not None
            return self.only.shot
        compared, model = self.compared(), self.model
        counts = sum((member.gained for member in compared), self.gone.get(model, Counts()))
        sizes = {member.url: member.shot.block_size or 0 for member in compared if member.shot is not None}
        smallest = min(filter(None, sizes.values()), default=0)
        # Of a prompt's last part of a block, only a server with smaller blocks may have some.
        parts = sum(max(0, sizes.get(each.url, 0) - smallest) * each.gained.requests for each in compared)
        unseen = sum(counts.missed[cause] for cause in UNSEEN)
        self._forgot = self._forgot or any(member.watched.account.forgotten for member in compared)
        if not self._forgot:
            self._unseen = unseen
        forgotten = max(0, unseen - self._unseen)
        return FleetSnapshot(
            at=time.time(),
            model=model,
            fleet=_funnel(counts, parts, forgotten),
            servers=[_share(member, model) for member in self.members.values()],
            notes=self._notes(compared),
            snapshots={
                member.url: member.shot
                for member in self._own
                if member.shot is not None and member.down_since is None
            },
        )

    def _notes(self, compared: Sequence[Member]) -> list[str]:
        notes = []
        if self.addresses.problem:
            notes.append(f"the servers were not read again: {self.addresses.problem}")
        shots = [member.shot for member in compared if member.shot is not None]
        if len(sizes := sorted({shot.block_size for shot in shots if shot.block_size})) > 1:
            words = " and ".join(map(str, sizes))
            notes.append(
                f"servers have blocks of {words} tokens: whole blocks of each are compared by their token ids"
            )
        if len(versions := sorted({shot.vllm for shot in shots if shot.vllm})) > 1:
            words = " and ".join(versions)
            notes.append(f"servers run vLLM {words}: images and adapters may be named differently")
        if self._forgot:
            forgotten = sum(member.watched.account.forgotten for member in compared)
            notes.append(
                f"{forgotten:,} blocks that were evicted long ago were forgotten (all servers' take up to "
                f"{FLEET_BYTES >> 20:,} MiB): they count as never seen, and `everything kept` reaches as far as these"
            )
        if self.gone:
            notes.append("servers that are no longer named are in the sums, and in no row")
        return notes


def _share(member: Member, model: str) -> ServerShare:
    counts, shot, others = member.gained, member.shot, member.others
    misses = {cause: tokens for cause, tokens in counts.missed.items() if tokens} if member.heard else {}
    if member.heard and counts.unexplained > 0:
        misses["computing"] = counts.unexplained
    ages = others.ages if others is not None else ()
    answers = shot is not None and member.down_since is None
    return ServerShare(
        counts.queries,
        counts.hits,
        misses,
        url=member.url,
        since=member.since,
        model=member.model,
        why=_why(member, model),
        down_since=member.down_since,
        requests=counts.requests,
        evicted_blocks=counts.evicted,
        pool_use=shot.pool_use if shot is not None and answers else None,
        pool_blocks=shot.pool_blocks if shot is not None else None,
        block_size=shot.block_size if shot is not None else None,
        still_tokens=min(counts.still, misses.get(OTHER_REPLICA, 0)),
        still_s=statistics.median(ages) if ages else None,
    )


def _why(member: Member, model: str) -> str:
    """Return in words what is not known of a server, or why it is compared with none."""
    if member.same_as:
        return f"the same server as {member.same_as}: its figures are there"
    if not member.listens:
        return "it has not answered yet: what it had computed is not known"
    if member.model != model:
        return f"another model ({member.model}): it is in no sum"
    if member.shot is None:
        return "it has not answered yet: what it had computed is not known"
    events = member.shot.events
    if events.state != "on":
        return f"its events are {events.state}: what it holds is not known"
    if member.gap:
        since = time.strftime("%H:%M:%S", time.localtime(member.gap))
        return f"its events have a gap since {since}: what it holds since then is not known"
    if not events.complete:
        return "it was joined late: what it had computed before is not known"
    if not member.told:
        return (
            "a connector that does not tell what it loads, or --prefix-match-unit: its misses have no cause"
        )
    return ""


def _funnel(counts: Counts, parts: int, forgotten: int) -> Funnel:
    """Return the funnel. `parts`, `forgotten`: tokens of which events do not tell: of parts of blocks, of old ones."""
    asked, hits = counts.queries, min(counts.hits, counts.queries)
    vague = parts + counts.untold + max(0, counts.unexplained) + counts.blind

    def bound(beyond: Bounds, least: int, more: int = 0) -> Range:
        low = max(least, hits + beyond.least - counts.recomputed)
        high = max(low, hits + beyond.most + vague + more)
        return Range(min(low, asked), min(high, asked))

    best = bound(counts.held, hits)
    everything = bound(counts.kept, best.least, forgotten)
    most = max(everything.most, best.most)
    return Funnel(
        prompt_tokens=asked, as_routed=hits, best_replica=best, everything=Range(everything.least, most)
    )
