"""Audits a server's KV events: says what an index that is built on them would get wrong (`kvtune watch URL --audit`).

In: batches as the reader read them, and scrapes of /metrics. Out: an `Audited`. It keeps an index as a router would: by
medium and group how often each block is stored. `ROWS` has every finding, with the function that sees it. What a
missing batch may explain is not reported: the rank is `blind` until its cache is empty again.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from kvtune.base.bounded import BeyondError, TooLongError, cpu_limit
from kvtune.base.errors import EXIT_USAGE, KvtuneError, UsageError
from kvtune.base.units import count
from kvtune.data.run.signature import identity
from kvtune.data.show.parts import Document, Section, grid
from kvtune.data.show.terminal import Column, one_line
from kvtune.servers.watch.cache import BYTES_CPU_S, LOOK_CPU_S
from kvtune.servers.watch.endpoints import Named, Source, host_of, sources_named
from kvtune.servers.watch.events import GPU, Cleared, Hash, Reader, Received, Removed, Stored, Stream
from kvtune.servers.watch.metrics import Scrape, begun_anew
from kvtune.servers.watch.server import Server
from kvtune.servers.watch.watched import ANSWERED, named

LATE_S = 10.0
"""Seconds from which on an event is late."""
FEWEST = 20
"""Fewest events of a model after which a group without any block is called silent."""
MOST_KNOWN = 1 << 20
"""Most blocks of a rank that are remembered. Beyond that the earliest stored that are not held are forgotten."""
MOST_HELD, MOST_PLACES = 1 << 21, 512
"""Most blocks that a rank may hold, and groups of media that hold them. An audit of more ends."""
LOOK_S, TAKE_S = 1.0, 0.1
"""Seconds between two scrapes, and between two looks for events."""


Place = tuple[str, int]
"""A medium, and a group of the KV cache."""


@dataclass(slots=True)
class Rank:
    """What the events of one data-parallel rank say that it holds: by place, how often each block.

    `blind`: the finding that explains what looks odd, as a batch is missing since the cache was empty; "": none is.
    `events`, `tokens`, `blocks`, `kinds`: of what was stored on the GPU, by group.
    """

    number: int = -1
    blind: str = ""
    held: defaultdict[Place, Counter[Hash]] = field(default_factory=lambda: defaultdict(Counter))
    known: dict[Hash, None] = field(default_factory=dict)
    copies: int = 0
    """On the GPU."""
    events: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    blocks: Counter[int] = field(default_factory=Counter)
    kinds: dict[int, str] = field(default_factory=dict)
    block: int = 0
    unsure: set[str] = field(default_factory=set)
    """Tiers that a reset of the pool may have emptied."""
    tiers: set[str] = field(default_factory=set)
    """Those of which an event came."""

    _forget_at: int = MOST_KNOWN

    def media(self, name: Hash) -> set[str]:
        """Return the media that hold a block."""
        return {medium for (medium, _), names in self.held.items() if name in names}

    def store(self, event: Stored) -> None:
        medium, group = _place(event)
        self.held[medium, group].update(event.block_hashes)
        self.known |= dict.fromkeys(event.block_hashes)
        if medium == GPU:
            self.events[group] += 1
            self.tokens[group] += len(event.token_ids)
            self.blocks[group] += len(event.block_hashes)
            self.kinds[group] = event.kv_cache_spec_kind or "full_attention"
            self.copies += len(event.block_hashes)
            self.block = max(self.block, event.block_size)
        else:
            self.tiers.add(medium)
        if len(self.known) > self._forget_at:  # not one by one: what is held is passed over each time
            surplus = (name for name in list(self.known) if not self.media(name))
            for name in islice(surplus, len(self.known) - MOST_KNOWN):
                del self.known[name]
            self._forget_at = len(self.known) + MOST_KNOWN // 4

    def remove(self, event: Removed) -> None:
        place = _place(event)
        names = self.held[place]
        if place[0] != GPU:
            self.tiers.add(place[0])
        for name in event.block_hashes:
            self.copies -= place[0] == GPU and name in names
            names[name] -= 1
            if names[name] <= 0:
                del names[name]

    def clear(self) -> None:
        """Empty the pool. Whether the tiers below it were emptied, too, no event says."""
        self.unsure |= {medium for medium, _ in self.held} - {GPU}
        self.held.clear()
        self.known.clear()
        self.copies, self.blind = 0, ""


def _place(event: Stored | Removed) -> Place:
    return event.medium or GPU, event.group_idx or 0


class Finding(msgspec.Struct, frozen=True):
    """`times`: how often it was seen. `wrong`: what an index built on these events gets wrong.

    `design`: why vLLM does so by design; "" if it should not. `allowed`: the user's index knows it.
    """

    name: str
    title: str
    times: int
    example: str
    wrong: str
    design: str = ""
    allowed: bool = False


@dataclass(slots=True)
class Seen:
    times: int = 0
    example: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of finding. `wrong`: what an index gets wrong; `design`: why vLLM does so, if it does so by design.

    `stored`, `removed`: how often an event shows it, asked before the event is applied. Without them `Audit` counts it.
    `needs_all`: a batch that is missing explains it, too.
    """

    name: str
    title: str
    wrong: str
    design: str = ""
    stored: Callable[[Rank, Stored], int] | None = None
    removed: Callable[[Rank, Removed], int] | None = None
    needs_all: bool = False

    def finding(self, seen: Seen, allowed: bool) -> Finding:
        example = one_line(seen.example)
        return Finding(self.name, self.title, seen.times, example, self.wrong, self.design, allowed)


ROWS = (
    Row(
        "lost",
        "batches that neither came nor were kept for a replay",
        "blocks that they stored are missing from it, blocks that they removed stay in it until the cache is reset",
    ),
    Row(
        "gaps",
        "batches that did not come, and that the replay had",
        "an index without replay misses what they stored, and keeps what they removed",
    ),
    Row(
        "unreadable",
        "messages in another format",
        "it misses what they stored, and keeps what they removed",
    ),
    Row(
        "restart",
        "a restart that no event tells",
        "the blocks of the dead server stay in it: prompts are sent there for hits that cannot come",
        "vLLM numbers its batches from 0 again and publishes no AllBlocksCleared when it starts",
    ),
    Row(
        "late_joiner",
        "blocks of chains whose beginning was published before the first batch that could be read",
        "it has the deep blocks and none of the roots: these prompts look cold, and their removals match nothing",
        "vLLM keeps `buffer_steps` batches for a replay, and none without `replay_endpoint`",
    ),
    Row(
        "orphans",
        "blocks stored after a parent that nobody stored",
        "it cannot tell which prompt they belong to: what follows them is never found",
        stored=lambda rank, event: (
            bool(event.block_hashes and event.parent_block_hash is not None)
            and event.parent_block_hash not in rank.known
        ),
        needs_all=True,
    ),
    Row(
        "never_stored",
        "removals of blocks that were not stored",
        "it is told to forget what it does not have: an index that counts copies goes wrong by one",
        removed=lambda rank, event: (
            event.medium not in rank.unsure
            and sum(name not in rank.held[_place(event)] for name in event.block_hashes)
        ),
        needs_all=True,
    ),
    Row(
        "stored_twice",
        "blocks stored again in a group that holds them",
        "an index that keeps a set drops the block at the first removal though a copy is left: count copies",
        "vLLM stores a copy for each request that computed the block, and removes each",
        stored=lambda rank, event: sum(name in rank.held[_place(event)] for name in event.block_hashes),
        needs_all=True,
    ),
    Row(
        "overfull",
        "more blocks held than the pool has",
        "it credits the server with blocks that cannot be there",
    ),
    Row(
        "sparse_groups",
        "events with fewer hashes than blocks of tokens",
        "an index that pairs hashes with tokens in their order places blocks wrongly; one that takes the group for "
        "whole counts hits that cannot come",
        "vLLM keeps only the blocks that a later prompt can hit, of sliding windows and states, and does not say which",
        stored=lambda _, event: (
            _place(event)[0] == GPU and len(event.block_hashes) * event.block_size < len(event.token_ids)
        ),
    ),
    Row(
        "silent_groups",
        "groups of which no block was published",
        "a hit needs all groups: it cannot know whether one comes",
    ),
    Row(
        "blank_tier",
        "events of a tier without tokens, hashes or block size",
        "an index that places blocks by their tokens drops them: the tier is invisible to it",
        "vLLM's OffloadingConnector leaves them out unless `self_describing_kv_events` is on, and for groups with "
        "windows or states",
        stored=lambda _, event: (
            _place(event)[0] != GPU and not (event.block_hashes and event.token_ids and event.block_size)
        ),
    ),
    Row(
        "removed_by_tier",
        "removals from one tier of blocks that another tier holds",
        "an index that takes them for removals of the block loses what the server can still load",
        "vLLM publishes each tier's own removals: `medium` says of which",
        removed=lambda rank, event: sum(
            bool(rank.media(name) - {_place(event)[0]}) for name in event.block_hashes
        ),
    ),
    Row(
        "late",
        f"events that came more than {LATE_S:.0f} s after what they tell",
        "meanwhile it sends prompts by a cache that is no more, and does not know the one that is",
    ),
)
NAMES = tuple(row.name for row in ROWS)
OF_STORED = [(row, row.stored) for row in ROWS if row.stored is not None]
OF_REMOVED = [(row, row.removed) for row in ROWS if row.removed is not None]


class Audited(msgspec.Struct, frozen=True):
    """What the audit of a server's events found. `unchecked`: by finding, why it could not be looked for."""

    url: str
    at: float
    seconds: float
    model: str
    vllm: str
    ranks: int
    batches: int
    stored_blocks: int
    removed_blocks: int
    resets: int
    restarts: int
    complete: bool
    findings: list[Finding]
    unchecked: dict[str, str] = {}
    notes: list[str] = []

    @property
    def failed(self) -> bool:
        return any(not each.allowed for each in self.findings)


@dataclass
class Audit:
    """Takes batches and scrapes, and counts what is wrong. Pure: the caller hands over what came, and when."""

    ranks: dict[int, Rank] = field(default_factory=dict)
    streams: list[Stream] = field(default_factory=list)
    seen: dict[str, Seen] = field(default_factory=dict)
    batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    resets: int = 0
    restarts: int = 0
    """The most of all ranks, by the numbers of their batches."""
    begun: int = 0
    """Restarts by /metrics."""
    unanswered: int = 0
    """Questions for /metrics without an answer."""
    most: int = 0
    last: Scrape | None = None
    _again: Counter[int] = field(default_factory=Counter)
    """Restarts by rank."""
    _reopened: set[int] = field(default_factory=set)
    """Ranks whose events have other addresses since a restart."""
    _fastest_s: dict[int, float] = field(default_factory=dict)
    """The smallest time of each rank from a batch's own time to its coming: the clocks' difference, at least."""
    _asked: deque[tuple[float, float]] = field(default_factory=deque)
    """Looks of the last LATE_S seconds: when, and the tokens that events had to tell by then, at least."""
    _base: tuple[float, float, float] | None = None
    """Computed tokens, answered prompts and stored tokens from which on events must tell them."""

    def add(self, received: Received) -> None:
        rank = self.ranks.setdefault(received.rank, Rank())
        events = received.batch.events
        if received.fresh or received.rank in self._reopened:
            self._reopened.discard(received.rank)
            self._restarted(received.rank, rank, events)
        if rank.number < 0 < received.number:
            rank.blind = "late_joiner"
        elif received.number > rank.number + 1:
            rank.blind = "lost"
        rank.number = received.number
        self.batches += 1
        for event in events:
            if isinstance(event, Stored):
                for row, asked in OF_STORED:
                    self._note(row, asked(rank, event), rank, received, event)
                self.stored_blocks += len(event.block_hashes)
                rank.store(event)
            elif isinstance(event, Removed):
                for row, ask in OF_REMOVED:
                    self._note(row, ask(rank, event), rank, received, event)
                self.removed_blocks += len(event.block_hashes)
                rank.remove(event)
            else:
                self.resets += 1
                rank.clear()
        if len(rank.held) > MOST_PLACES or sum(map(len, rank.held.values())) > MOST_HELD:
            raise BeyondError(
                f"more than {MOST_HELD:,} blocks are held, or in more than {MOST_PLACES} places"
            )
        if not any(each.blind == "lost" for each in self.ranks.values()):
            self.most = max(self.most, sum(each.copies for each in self.ranks.values()))
        if received.came:
            self._timed(received)

    def _note(self, row: Row, times: int, rank: Rank, received: Received, event: Stored | Removed) -> None:
        if not times:
            return
        if not (row.needs_all and rank.blind):
            self.find(row.name, times, _example(received, event))
        elif rank.blind == "late_joiner" and row.name != "stored_twice":
            self.find(rank.blind, times, _example(received, event))

    def find(self, name: str, times: int, example: str) -> None:
        seen = self.seen.setdefault(name, Seen(example=example))
        seen.times += times

    def _restarted(self, number: int, rank: Rank, events: Sequence[object]) -> None:
        self._again[number] += 1
        self.restarts = max(self._again.values())
        stale = sum(map(len, rank.held.values()))
        if not (events and isinstance(events[0], Cleared)):
            numbers = f"rank {number}: after batch {rank.number} the numbers began again at 0"
            self.find("restart", 1, f"{numbers}, and {count(stale)} blocks were never removed")
        rank.clear()
        rank.number = -1
        self._base = None
        self._asked.clear()

    def _timed(self, received: Received) -> None:
        """Find a batch that came late. The server's clock may be another: its rank's fastest batch was in time."""
        way_s = received.came - received.batch.ts
        fastest_s = min(way_s, self._fastest_s.get(received.rank, way_s))
        self._fastest_s[received.rank] = fastest_s
        if (late_s := way_s - fastest_s) > LATE_S:
            self.find("late", 1, f"batch {received.number} of rank {received.rank} came {late_s:.0f} s late")

    def look(self, scrape: Scrape) -> bool:
        """Compare the counters with the events. Return whether the server was restarted since the look before."""
        anew = self.last is not None and begun_anew(self.last, scrape)
        self.begun += anew
        self.last = scrape
        if anew:
            self._base = None
            self._asked.clear()
            return True
        computed, answered = scrape.get("prompt_tokens"), scrape.get(ANSWERED)
        if computed is None or answered is None:
            return False
        computed -= sum(scrape.get(f"{kind}prefix_cache_hits") or 0.0 for kind in ("", "external_"))
        published = float(sum(max(rank.tokens.values(), default=0) for rank in self.ranks.values()))
        idle = scrape.get("num_requests_running") == 0 == scrape.get("num_requests_waiting")
        if self._base is None and (self._from_start or idle):
            self._base = (0.0, 0.0, 0.0) if self._from_start else (computed, answered, published)
        if self._base is None:
            return False
        before, prompts, stored = self._base
        block = max([scrape.block_size or 0, *(rank.block for rank in self.ranks.values())])
        # A prompt's tail is in no event: less than a block.
        self._asked.append((scrape.at, computed - before - block * (answered - prompts)))
        while len(self._asked) > 1 and self._asked[1][0] <= scrape.at - LATE_S:
            self._asked.popleft()
        asked_at, least = self._asked[0]
        if asked_at <= scrape.at - LATE_S and least > published - stored:
            later = f"{scrape.at - asked_at:.0f} s later events had told of {count(published - stored)}"
            self.find("late", 1, f"{count(least)} prompt tokens were computed, and {later}")
            self._base = (computed, answered, published)
            self._asked.clear()
        return False

    @property
    def _from_start(self) -> bool:
        """Whether every event since the server's start was read, and the server was not restarted."""
        whole = all(stream.complete and not stream.restarts for stream in self.streams)
        return bool(self.streams) and whole and not self.begun

    def reopen(self) -> None:
        """Take the next batch of each rank for the first after a restart: its events come from another address."""
        self._reopened = set(self.ranks)

    @property
    def dropped(self) -> int:
        """Count the live batches for which kvtune itself had no room: no fault of the server's."""
        return sum(stream.dropped for stream in self.streams)

    def findings(self, allowed: Iterable[str] = ()) -> list[Finding]:
        """Return what was found, in the order of ROWS."""
        counted = self.seen | {name: seen for name, seen in self._at_the_end() if seen.times > 0}
        names = set(allowed)
        return [row.finding(counted[row.name], row.name in names) for row in ROWS if row.name in counted]

    def _at_the_end(self) -> Iterator[tuple[str, Seen]]:
        """Yield the findings that are known at the end."""
        gaps, all_missing = sum(s.gaps for s in self.streams), sum(s.missing for s in self.streams)
        missing = max(0, all_missing - self.dropped)
        lost = min(missing, sum(s.lost for s in self.streams))
        yield "lost", Seen(lost, f"{count(lost)} of {count(missing)} batches missing in {count(gaps)} gaps")
        yield "gaps", Seen(missing - lost, f"{count(missing)} batches missing in {count(gaps)} gaps")
        unread = sum(s.unknown for s in self.streams)
        yield "unreadable", Seen(unread, next((s.unread for s in self.streams if s.unread), ""))
        if unsaid := self.begun - self.restarts:
            restart = self.seen.get("restart", Seen())
            stale = sum(rank.copies for rank in self.ranks.values())
            example = (
                f"/metrics began anew, no event came since, and {count(stale)} blocks were never removed"
            )
            yield "restart", Seen(restart.times + unsaid, restart.example or example)
        pool = self._pool()
        if pool and self.most > pool:
            yield "overfull", Seen(1, f"{count(self.most)} blocks in a pool of {count(pool)}")
        silent = sorted({name for rank in self.ranks.values() for name in _silent(rank)})
        yield "silent_groups", Seen(len(silent), "; ".join(silent))

    def _pool(self) -> int:
        return (self.last.blocks or 0) if self.last is not None and not self.last.match_unit else 0

    def unchecked(self) -> dict[str, str]:
        """Return why findings could not be looked for."""
        reasons: dict[str, str] = {}
        blind = {rank.blind for rank in self.ranks.values()} - {""}
        if blind:
            why = "batches are missing" if "lost" in blind else "the server's first batches are not known"
            reasons |= {row.name: why for row in ROWS if row.needs_all}
        if not self._pool():
            unit = self.last is not None and self.last.match_unit
            reasons["overfull"] = "a block has several names" if unit else "/metrics does not have the pool"
        elif "lost" in blind:
            reasons["overfull"] = "batches are missing"
        if not any(rank.tiers for rank in self.ranks.values()):
            reasons |= dict.fromkeys(("blank_tier", "removed_by_tier"), "no event of a tier came")
        if self._base is None:
            reasons["late"] = "by the batches' own times only: the server was never idle, and began before"
        return {name: why for name, why in reasons.items() if name not in self.seen}


def _silent(rank: Rank) -> Iterator[str]:
    if max(rank.events.values(), default=0) < FEWEST:
        return
    for group in range(max(rank.events) + 1):
        if not rank.blocks[group]:
            kind = rank.kinds.get(group, "never named")
            yield f"group {group} ({kind}): {count(rank.events[group])} events, no block"


def _example(received: Received, event: Stored | Removed) -> str:
    medium, group = _place(event)
    names = event.block_hashes
    where = f"batch {received.number} of rank {received.rank}, group {group} on {medium}"
    first = f" from {named(names[0])}" if names else ""
    if isinstance(event, Removed):
        return f"{where}: {count(len(names))} blocks removed{first}"
    parent = event.parent_block_hash
    after = f" after {named(parent)}" if parent is not None else ""
    tokens = f"{count(len(event.token_ids))} tokens in blocks of {event.block_size}"
    return f"{where}: {count(len(names))} blocks stored{first}{after}, {tokens}"


def audit_server(server: Server, listen: Named, seconds: float, allowed: Sequence[str] = ()) -> Audited:
    """Audit a server's events for some seconds, after their history. KvtuneError (2) if that cannot be done."""
    try:
        return _audited(server, listen, seconds, allowed)
    except KvtuneError as error:
        raise KvtuneError(error.message, error.hint, EXIT_USAGE) from None


def _audited(server: Server, listen: Named, seconds: float, allowed: Sequence[str]) -> Audited:
    if wrong := [name for name in allowed if name not in NAMES]:
        raise UsageError(f"{one_line(wrong[0])!r} is no finding of --audit", f"they are {', '.join(NAMES)}")
    publishers = server.event_sources() or sources_named(listen)
    audit, vllm, scrape = Audit(), server.version(), server.scrape()
    audit.look(scrape)
    if scrape.cache.get("enable_prefix_caching") == "False":
        raise UsageError(f"{server.base} has no prefix cache, so no KV events", "audit a server that has one")
    if not publishers:
        raise UsageError(
            f"{server.base} publishes no KV events",
            "start it with --kv-events-config, as docs/watch.md says; before vLLM 0.31 add --events tcp://HOST:PORT",
        )
    notes = _read(audit, publishers, server, listen, seconds)
    findings = audit.findings(allowed)
    if not audit.batches and not findings:
        raise KvtuneError(
            notes[0] if notes else f"{server.base} published no event in {seconds:.0f} s",
            "send requests to the server while the audit runs, or give it more --seconds",
        )
    if audit.dropped:
        notes.append(
            f"kvtune itself had no room for {count(audit.dropped)} batches, and asked for them again"
        )
    if audit.unanswered:
        notes.append(f"{count(audit.unanswered)} questions for /metrics got no answer")
    return Audited(
        url=server.base,
        at=time.time(),
        seconds=seconds,
        model=audit.last.model if audit.last else "",
        vllm=vllm,
        ranks=len(audit.ranks),
        batches=audit.batches,
        stored_blocks=audit.stored_blocks,
        removed_blocks=audit.removed_blocks,
        resets=audit.resets,
        restarts=max(audit.restarts, audit.begun),
        complete=all(stream.complete for stream in audit.streams),
        findings=findings,
        unchecked=audit.unchecked(),
        notes=[one_line(note) for note in notes],
    )


def _read(
    audit: Audit, publishers: Mapping[int, Source], server: Server, listen: Named, seconds: float
) -> list[str]:
    """Take events and scrapes for some seconds after the history. Return what the reader has to say of them."""
    reader = _reading(audit, publishers, server, listen)
    begun = scraped = 0.0
    try:
        while not begun or not over(audit, begun + seconds):
            if not begun and reader.ready.is_set():
                begun = time.monotonic()
            _take(audit, reader)
            if reader.problem:
                raise KvtuneError(f"the events cannot be read: {reader.problem}", "run the audit again")
            if begun and time.monotonic() > scraped + LOOK_S:
                scraped = time.monotonic()
                try:
                    anew = audit.look(server.scrape())
                    sources = server.event_sources() if anew else {}
                except KvtuneError:  # a restart may be what is looked for
                    audit.unanswered += 1
                    continue
                if sources and sources != publishers:
                    reader.close()
                    audit.reopen()
                    publishers = sources
                    reader = _reading(audit, publishers, server, listen)
            time.sleep(TAKE_S)
        _take(audit, reader)
        return reader.notes()
    finally:
        reader.close()


def _take(audit: Audit, reader: Reader) -> None:
    """Add the batches that came. KvtuneError if they are more than can be counted."""
    came = reader.take()
    try:
        with cpu_limit(LOOK_CPU_S + sum(received.size for received in came) / BYTES_CPU_S):
            for received in came:
                audit.add(received)
    except (BeyondError, TooLongError) as error:
        raise KvtuneError(f"the events cannot be counted: {error}", "run the audit again") from None


def over(_: Audit, end: float) -> bool:
    """Whether the audit has taken its time. Tests end it when it has read what they published."""
    return time.monotonic() >= end


def _reading(audit: Audit, sources: Mapping[int, Source], server: Server, listen: Named) -> Reader:
    reader = Reader(sources, host_of(server.base), listen).start()
    audit.streams += reader.streams.values()
    return reader


def document(answer: Audited) -> Document:
    """Return the answer: a table of the findings, then of each what it means for an index."""
    open_ = sum(not each.allowed for each in answer.findings)
    allowed = len(answer.findings) - open_
    words = f"{open_ or 'no'} finding{'' if open_ == 1 else 's'}{f' ({allowed} allowed)' if allowed else ''}"
    vllm = f"vLLM {answer.vllm}".strip()
    return Document(
        name="kvtune watch --audit",
        subject=answer.url,
        headline=f"{answer.url}   {answer.model}   {vllm}: {words} in {answer.seconds:.0f} s of KV events",
        sections=tuple(_sections(answer)),
        identity=identity("audit", answer.url, answer.at),
        title=f"{answer.url} · audit · kvtune",
    )


COLUMNS = (
    Column("finding", right=False),
    Column("times"),
    Column("what was seen", right=False, folds=True),
    Column("by vLLM's design", right=False, rank=1),
    Column("allowed", right=False, rank=1),
)


def _sections(answer: Audited) -> Iterator[Section]:
    facts = (
        ("batches", f"{count(answer.batches)} of {answer.ranks} rank{'' if answer.ranks == 1 else 's'}"),
        ("blocks", f"stored {count(answer.stored_blocks)}, removed {count(answer.removed_blocks)}"),
        ("resets, restarts", f"{count(answer.resets)}, {count(answer.restarts)}"),
        ("read from the server's start on", "yes" if answer.complete else "no"),
    )
    yield Section("events", "What came", facts=facts, notes=tuple(answer.notes))
    rows = [
        (each.name, each.times, each.title, "yes" if each.design else "no", "yes" if each.allowed else "")
        for each in answer.findings
    ]
    yield Section("findings", "Findings", tables=(grid(COLUMNS, rows),) if rows else ())
    for each in answer.findings:
        about = [("example", each.example), ("an index", each.wrong)]
        about += [("why", each.design)] if each.design else []
        yield Section(each.name, f"{each.name}: {each.title}", facts=tuple(about))
    notes = tuple(f"{name}: {why}" for name, why in answer.unchecked.items())
    yield Section("unchecked", "What could not be checked", notes=notes)
