"""Watches one server: its life by its metrics and events, one look after another, as `Snapshot`s.

In: a `Server` to ask. The caller's loop makes the looks; a thread reads the events. `Cache` and `Account` have what the
events tell, `Totals` what the counters tell, and each miss with its cause.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import nlargest
from operator import attrgetter
from typing import Any

from kvtune.base.bounded import cpu_limit
from kvtune.base.errors import KvtuneError, UsageError, reason
from kvtune.data.installed import release
from kvtune.data.run.extras import ServerDivergence, ServerPrefix
from kvtune.data.show.terminal import one_line
from kvtune.requests.log.token_ids import unpacked
from kvtune.servers.watch.account import Account
from kvtune.servers.watch.cache import BYTES_CPU_S, LOOK_CPU_S, MOST_HELD_BYTES
from kvtune.servers.watch.drafts import drafts
from kvtune.servers.watch.endpoints import Named, Source, host_of, sources_named
from kvtune.servers.watch.events import TRIED, Hash, Reader, Received
from kvtune.servers.watch.facts import Facts, ShapeAtHand
from kvtune.servers.watch.lists import Divergence
from kvtune.servers.watch.metrics import Between, Scrape, another_server, begun_anew, served
from kvtune.servers.watch.others import Others
from kvtune.servers.watch.possible import possible
from kvtune.servers.watch.regime import Limits, finding
from kvtune.servers.watch.server import Server
from kvtune.servers.watch.snapshot import (
    LONG_S,
    SHORT_S,
    SPANS,
    DifferenceText,
    Events,
    Period,
    Snapshot,
    Times,
)
from kvtune.servers.watch.tier import use
from kvtune.servers.watch.totals import HEARD_S, SETTLE_S, Look, Mark, Totals

ASK_S = 0.9
"""Shortest time in seconds between two scrapes of the live view, which refreshes twice a second."""
SHOWN = 50
"""Most prefixes, and most divergences, in a snapshot."""
MOST_TEXTS = 1_000
"""Most texts that are remembered."""
WORDS = 16
"""How many tokens of a prefix are shown as text."""
SWINGS_S = 30.0
"""Two falls of counters within this time are no two restarts of one server."""
QUERIES = "prefix_cache_queries"
ANSWERED = "time_to_first_token_seconds_count"
"""The series that counts the prompts whose first token came."""
HISTORY_S = 10.0
"""Seconds that the first look waits at most for the server's history of events."""
MOST_KEPT_BYTES = 1 << 30
"""Most memory of the batches that are kept to join a log with them: hours of a usual load."""


@dataclass(slots=True)
class Room:
    """Memory that is left for the kept batches of all servers."""

    left: int = MOST_KEPT_BYTES


@dataclass(frozen=True, slots=True)
class Life:
    """What was counted from one start of the server, or from the first look, to the last look before the next start."""

    begun: float
    ended: float
    period: Period
    requests: int
    preemptions: int
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class _Look:
    scrape: Scrape
    mark: Mark


@dataclass
class Watched:
    """`look` scrapes /metrics and takes the events that came; KvtuneError if the server cannot be reached.

    `others`: of a list of servers, which counts the events of all in their order; None: it counts its own as they come.
    `ask_s`: a look within this many seconds of a scrape takes events only. A scrape costs the API server about 6 ms.
    `shape_at_hand`: how to know a model's shape; without it nothing but the account is looked for, no regime. `limits`:
    those of the server's limits that the user gave. `keep`: a list to which every batch is appended, for a recording,
    as long as there is `room`.
    """

    server: Server
    named: Named = field(default_factory=Named)
    others: Others | None = None
    with_text: bool = False
    settle: float = SETTLE_S
    ask_s: float = 0.0
    shape_at_hand: ShapeAtHand | None = None
    limits: Limits = field(default_factory=Limits)
    keep: list[Received] | None = None
    room: Room = field(default_factory=Room)

    def __post_init__(self) -> None:
        self.account = Account(by_content=self.others is not None, others=self.others)
        # The events of several servers are counted before these are looked at, one after another.
        self.totals = Totals(settle=self.settle, heard=HEARD_S if self.others is None else 4 * HEARD_S)
        self.facts = Facts(self.server, self.shape_at_hand, self.limits) if self.shape_at_hand else None
        self.version = self.model = ""
        self.joined: Scrape | None = None
        """The scrape at which its history of events was asked for."""
        self.reader: Reader | None = None
        self.restarts = 0
        self.ended: list[Life] = []
        """The server's lives before its last restart."""
        self.kept_until: float | None = None
        """The time of the last batch in `keep`, if there was no room for later ones."""
        self.cpu_s = LOOK_CPU_S
        """CPU time that is left until the next look."""
        self._looks: deque[_Look] = deque()
        self._first: _Look | None = None
        self._begun: tuple[Mark, Scrape | None] | None = None
        """The counts at the first look, with its scrape; after a restart those at the server's start, without."""
        self._fallen: deque[float] = deque(maxlen=2)
        """When counters last fell though no process's start told of a restart."""
        self._late: Counter[str] = Counter()
        self._late_evicted = 0
        """Tokens and evictions of the server's history that were read after the first look: they are older."""
        self._fresh: set[int] = set()
        """Ranks that were restarted since the last scrape, according to their events."""
        self._asked_for: dict[bytes, str] = {}
        """The text of tokens, as the server gave it."""

    def start(self) -> None:
        """Read the events and their history, if the server publishes any, and make the first scrape."""
        self.listen()
        self.begin()

    def listen(self) -> None:
        """Ask for the server's addresses of events, and read their history."""
        with _only_one_line(self.server.base):
            self.joined = self.server.scrape()
            self.model = self.joined.model
            self.version = self.server.version()
            self._listen(self.server.event_sources())

    def begin(self) -> None:
        """Make the first scrape, once `listen` has read the history."""
        with _only_one_line(self.server.base):
            self._take()
            if self.facts is not None:
                self.facts.ask()

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()
        self.server.close()

    def look(self) -> Snapshot:
        with _only_one_line(self.server.base):
            self._take()
            if self.facts is not None:
                self.facts.ask_limits()
            return self.snapshot()

    def _take(self) -> None:
        if self._looks and time.time() - self._looks[-1].scrape.at < self.ask_s:
            self._events()
            return
        scrape = self.server.scrape()
        self._events()
        before = self._looks[-1].scrape if self._looks else None
        anew = before is not None and begun_anew(before, scrape)
        if before is not None:
            self._one_server(before, scrape, anew)
        if anew:
            self._anew(scrape)
        self._fresh.clear()
        counted = self._counted(scrape)
        if not self._looks and not anew:
            whole = not self._heard() or self._complete()
            look = _Look(scrape, self.totals.begin(counted, (scrape.started or scrape.at) if whole else None))
        else:
            look = _Look(scrape, self.totals.add(counted))
        if self._first is None:
            self._first = look
        if self._begun is None:
            self._begun = (look.mark, scrape)
        self._looks.append(look)
        while len(self._looks) > 2 and self._looks[1].scrape.at < scrape.at - LONG_S:
            self._looks.popleft()

    def _one_server(self, before: Scrape, scrape: Scrape, anew: bool) -> None:
        """UsageError if several servers answer in turn: their counters are no account of any of them."""
        if anew and before.started == scrape.started:
            self._fallen.append(scrape.at)
        swings = len(self._fallen) == 2 and self._fallen[1] - self._fallen[0] < SWINGS_S
        if another_server(before, scrape) or swings:
            raise UsageError(
                f"several servers answer in turn at {self.server.base}",
                "is it a load balancer? Give the address of one server",
            )

    def _anew(self, scrape: Scrape) -> None:
        """Begin again after a restart of the server: its cache is empty, and its flags may differ."""
        self.restarts += 1
        start = self.totals.anew(scrape.started or 0.0)
        self.ended.append(self.life())
        self._looks.clear()
        self._first, self._begun = None, (start, None)
        for rank in set(self.account.blocks) - self._fresh:
            self.account.forget(rank)
        self.version, self.model = self.server.version(), scrape.model
        if self.facts is not None:
            self.facts.ask()
        sources = self.server.event_sources()
        dead = self.reader is not None and self.reader.problem
        if dead or sources != (self.reader.sources if self.reader is not None else {}):
            if self.reader is not None:
                self.reader.close()
            for rank in list(self.account.blocks):
                self.account.forget(rank)
            self._listen(sources)
            self._events()

    def _listen(self, sources: Mapping[int, Source]) -> None:
        sources = sources or sources_named(self.named)
        self.reader = Reader(sources, host_of(self.server.base), self.named).start() if sources else None
        end = time.monotonic() + HISTORY_S
        while self.reader is not None and not self.reader.ready.wait(0.05) and time.monotonic() < end:
            self._events()

    def _counted(self, scrape: Scrape) -> Look:
        def now(name: str) -> int:
            return int(scrape.get(name) or 0)

        events = self.events
        loaded = now("external_prefix_cache_hits")
        counts = {
            name: None if scrape.get(name) is None else now(name) for name in ("prompt_tokens", ANSWERED)
        }
        counted = Look(
            scrape.at,
            now("prefix_cache_queries"),
            now("prefix_cache_hits") + loaded,
            counts["prompt_tokens"],
            scrape.get("num_requests_running") == 0 == scrape.get("num_requests_waiting"),
            now("num_preemptions"),
            evicted=self.account.evicted_blocks - self._late_evicted,
            lost=events.lost_batches + events.unknown_messages,
            on=events.state == "on",
            tells=not scrape.match_unit,
            loaded=loaded,
            answered=counts[ANSWERED],
            block=self.account.block_size,
            loads_told=self.account.loads_told,
        )
        if counted.idle or self.totals.computing(counted) == 0:
            self.account.settle()
        return replace(counted, tokens=self.account.tokens - self._late, pending=self.account.pending)

    def _events(self) -> None:
        if self.others is None:
            self.count(self.came())

    def came(self) -> list[Received]:
        """Return the batches that came since the last call, in order."""
        self.cpu_s = LOOK_CPU_S
        came = self.reader.take() if self.reader is not None else []
        if self.reader is not None and len(self.reader.sources) > 1:  # their histories come one after another
            came.sort(key=lambda received: received.batch.ts)
        return came

    def count(self, came: Sequence[Received]) -> None:
        """Count batches that `came`."""
        if self.reader is None or self.reader.problem:
            return
        late = bool(self._looks) and not self.reader.ready.is_set()
        tokens, evicted = Counter(self.account.tokens), self.account.evicted_blocks
        self.account.complete = all(stream.unbroken for stream in self.reader.streams.values())
        self.cpu_s += sum(received.size for received in came) / BYTES_CPU_S
        begun = time.process_time()
        try:
            with cpu_limit(max(0.01, self.cpu_s)):
                for received in came:
                    self.account.add(received)
                    if self.account.held_bytes > MOST_HELD_BYTES:
                        self.stop("they say that more blocks are cached than kvtune keeps in memory")
                        return
        except Exception as error:  # the account is no longer right, the server's own counters are
            self.stop(f"kvtune cannot count them: {one_line(reason(error))}")
            return
        self.cpu_s -= time.process_time() - begun
        for received in came:
            if self.keep is None or self.kept_until is not None:
                break
            self.keep.append(received)
            self.room.left -= received.size
            if self.room.left < 0:
                self.kept_until = received.batch.ts
        if late:
            self.account.settle()
            self._late += self.account.tokens - tokens
            self._late_evicted += self.account.evicted_blocks - evicted
        self._fresh |= {received.rank for received in came if received.fresh}

    def stop(self, why: str) -> None:
        """Read its events no further, and let go of what they told."""
        if self.reader is not None:
            self.reader.stop(why)
        self.account.blocks.clear()

    def _complete(self) -> bool:
        return self.reader is not None and all(each.complete for each in self.reader.streams.values())

    @property
    def last(self) -> tuple[Scrape, Mark]:
        """The last look's scrape and counts."""
        return self.scrape, self._looks[-1].mark

    @property
    def scrape(self) -> Scrape:
        """The last look's."""
        return self._looks[-1].scrape

    @property
    def told(self) -> bool:
        """Whether its events tell what was computed: those of loaded blocks, and of parts of blocks, do not."""
        return self.totals.told and not self.scrape.match_unit

    def begin_lists(self) -> None:
        """Let the lists of prefixes and of differences begin now."""
        self.account.settle()
        self.account.lists.clear()

    def life(self) -> Life:
        """Return what was counted since the first look, or since the server's last start, up to the last look."""
        assert self._begun is not None
        mark, first = self._begun
        last = self.scrape

        def counted(name: str) -> int:
            return max(0, int((last.get(name) or 0) - ((first.get(name) if first else None) or 0)))

        return Life(
            mark.at,
            last.at,
            self._since(mark),
            counted("request_success"),
            counted("num_preemptions"),
            self.totals.evicted - mark.counts.evicted,
        )

    def snapshot(self) -> Snapshot:
        last = self.scrape
        before = self._before(SHORT_S)
        short = Between(before.scrape, last)
        events = self.events
        prefixes, points = self._prefixes(), self._points()
        ranks = self.account.blocks.values()
        return Snapshot(
            url=self.server.base,
            at=last.at,
            model=last.model,
            vllm=self.version,
            engines=last.engines,
            events=events,
            running=last.whole("num_requests_running"),
            waiting=last.whole("num_requests_waiting"),
            waiting_by_reason={name: int(count) for name, count in last.reasons.items() if count},
            pool_use=last.get("kv_cache_usage_perc"),
            pool_blocks=last.blocks,
            block_size=last.block_size,
            preemptions=last.whole("num_preemptions"),
            requests=last.whole("request_success"),
            query_tokens=int(last.get("prefix_cache_queries") or 0),
            hit_tokens=int(
                (last.get("prefix_cache_hits") or 0) + (last.get("external_prefix_cache_hits") or 0)
            ),
            prompt_tokens=int(last.get("prompt_tokens") or 0),
            output_tokens=int(last.get("generation_tokens") or 0),
            evicted_blocks=self.account.evicted_blocks,
            prompt_tokens_s=short.rate("prompt_tokens"),
            output_tokens_s=short.rate("generation_tokens"),
            first_token=_times(short, "time_to_first_token_seconds"),
            between_tokens=_times(short, "inter_token_latency_seconds"),
            evicted_blocks_s=(self.totals.evicted - before.mark.counts.evicted) / short.seconds
            if self._heard() and short.seconds > 0
            else None,
            evicted_age_s=self.account.median_age_s(last.at - SHORT_S) if self._heard() else None,
            cached_blocks=sum(blocks.held() for blocks in ranks) if self._heard() else None,
            periods=self._periods(),
            prefixes=[row for _, row in prefixes],
            texts={row.first: self._text(root) for root, row in prefixes} if self.with_text else {},
            divergences=[
                ServerDivergence(
                    position=point.position,
                    first=named(point.root),
                    times=point.times,
                    new_tokens=point.new_tokens,
                )
                for point in points
            ],
            restarts=self.restarts,
            notes=self._notes(events, last),
            served=served(last),
            tier=use([blocks.tier for blocks in ranks], last, complete=self.told and self._complete()),
            differences=[self._difference(point) for point in points] if self.with_text else [],
            **self._beside(short, events),
        )

    def _beside(self, short: Between, events: Events) -> dict[str, Any]:
        """Return the fields of a snapshot that need more than the account."""
        if self.facts is None:
            return {}
        looks = [look.scrape for look in self._looks if look.scrape.at >= short.first.at]
        limits = self.facts.limits
        return {
            "regime": finding(looks, limits),
            "drafts": drafts(Between(self._before(LONG_S).scrape, short.last)),
            "possible": possible(short, self.facts.shape, limits.longest, self.account.block_size),
            "next": self.facts.more() if events.state == "off" else [],
        }

    def _before(self, seconds: float) -> _Look:
        """Return the newest look that is at least this many seconds older than the last look; else the oldest."""
        older = (look for look in reversed(self._looks) if look.scrape.at <= self.scrape.at - seconds)
        return next(older, self._looks[0])

    def _heard(self) -> bool:
        return self.events.state == "on"

    @property
    def events(self) -> Events:
        if self.reader is None:
            return Events("off")
        streams = self.reader.streams.values()
        unknown = sum(stream.unknown for stream in streams)
        read = sum(stream.last >= 0 for stream in streams)
        state = "on"
        if self.reader.problem or (unknown and not self.account.blocks):
            state = "unreadable"
        elif not any(stream.connected or stream.last >= 0 for stream in streams):
            state = "unreachable"
        return Events(state, self._complete(), sum(s.lost for s in streams), unknown, read)

    def _periods(self) -> dict[str, Period]:
        assert self._first is not None
        start = self.totals.start
        begun = ("since joined", self._first.mark)
        if start is not None and (not self._heard() or self._complete()):
            begun = ("since start", start)
        firsts = {name: self._before(seconds).mark for name, seconds in SPANS.items()} | dict([begun])
        return {name: self._since(mark) for name, mark in firsts.items()}

    def _since(self, mark: Mark) -> Period:
        now, tally = self.totals, self.totals.since(mark)
        return Period(
            tally.query_tokens,
            tally.hit_tokens,
            tally.misses if self._heard() else {},
            seconds=self.scrape.at - mark.at,
            recomputed=now.recomputed - mark.counts.recomputed,
            loaded_tokens=now.loaded - mark.counts.loaded,
        )

    def _prefixes(self) -> list[tuple[Hash, ServerPrefix]]:
        """Return the prefixes of more than one prompt, each with its first block, those with most tokens first."""
        rows = [
            (
                root,
                ServerPrefix(
                    first=named(root),
                    visits=prefix.visits,
                    hit_tokens=prefix.hit_tokens,
                    lost_tokens=prefix.lost_tokens,
                    longest_tokens=prefix.longest,
                ),
            )
            for root, prefix in self.account.lists.prefixes.items()
            if prefix.visits > 1
        ]
        rows.sort(key=lambda pair: pair[1].hit_tokens + pair[1].lost_tokens, reverse=True)
        return rows[:SHOWN]

    def _text(self, root: Hash) -> str:
        """Return the first words of a prefix."""
        block = next((b.known[root] for b in self.account.blocks.values() if root in b.known), None)
        return self._words(block.tokens[: 4 * WORDS] if block is not None else b"")

    def _points(self) -> list[Divergence]:
        return nlargest(SHOWN, self.account.lists.divergences.values(), key=attrgetter("new_tokens"))

    def _difference(self, point: Divergence) -> DifferenceText:
        return DifferenceText(*(self._words(tokens) for tokens in (point.before, point.earlier, point.later)))

    def _words(self, tokens: bytes) -> str:
        """Return the text of packed tokens. The server is asked only once for the same ones."""
        if tokens not in self._asked_for:
            if len(self._asked_for) > MOST_TEXTS:
                self._asked_for.clear()
            self._asked_for[tokens] = self.server.text_of(unpacked(tokens)) if tokens else ""
        return self._asked_for[tokens]

    def _of_events(self, events: Events) -> list[str]:
        assert self.reader is not None
        notes = self.reader.notes()
        if events.lost_batches:
            notes.append(f"{events.lost_batches} event batches were lost: what they stored looks unknown")
        if events.unknown_messages:
            kind = "messages of a kind that this kvtune does not know"
            notes.append(f"{events.unknown_messages} {kind}; the first: {self._unread()}")
        if not notes and not events.complete and not self._nothing_before():
            notes.append(
                "what was cached before kvtune joined is not known: a prompt that it has not seen is `unknown`. Join "
                "a server at its start, or start it with replay_endpoint in --kv-events-config: then kvtune asks for "
                "the events before it joined"
            )
        return notes

    def _unread(self) -> str:
        """Return why the first message was not read that was not."""
        assert self.reader is not None
        return next((s.unread for s in self.reader.streams.values() if s.unread), "")

    def _nothing_before(self) -> bool:
        """Whether no prompt had been looked up when kvtune joined, and no event is missing since."""
        first = self._begun[1] if self._begun is not None else None
        assert self.reader is not None
        read = all(stream.first in (0, None) for stream in self.reader.streams.values())
        return first is not None and not first.get(QUERIES) and read

    def _notes(self, events: Events, last: Scrape) -> list[str]:
        notes = []
        if self.version and ".".join(map(str, release(self.version)[:2])) not in TRIED:
            tried = ", ".join(TRIED)
            notes.append(
                f"vLLM {self.version}: this kvtune has not been tried with its events; tried: {tried}"
            )
        if events.state == "unreadable":
            why = self.reader.problem if self.reader else ""
            messages = f"({events.unknown_messages:,} messages); the first: {self._unread()}"
            why = why or f"kvtune does not know their format {messages}"
            notes.append(f"the server's events cannot be read: {why}")
        elif events.state != "off":
            notes += self._of_events(events)
        if forgotten := sum(blocks.forgotten for blocks in self.account.blocks.values()):
            notes.append(
                f"{forgotten} blocks were evicted so long ago that kvtune forgot them: they look never seen"
            )
        if not self.totals.told and events.state == "on":
            notes.append(
                "a connector loads blocks (from host memory or another machine), and its own events do not tell which: "
                "misses have no cause; a log of requests tells what was seen before"
            )
        if (unit := last.match_unit) and events.state == "on":
            notes.append(
                f"with --prefix-match-unit {unit} the server publishes parts of blocks, too, so misses have "
                "no cause; a log of requests tells what was seen before"
            )
        begun = self._first.scrape.get("num_preemptions") if self._first else None
        moved = (last.get("num_preemptions") or 0) - (begun or 0)
        if moved and events.state == "on":
            notes.append(
                f"{moved:.0f} requests were preempted: what they computed again may count as evicted"
            )
        return [one_line(note) for note in notes]


@contextlib.contextmanager
def _only_one_line(base: str) -> Iterator[None]:
    """Make of whatever an answer breaks a KvtuneError, so that the caller loses this look and goes on."""
    try:
        yield
    except KvtuneError:
        raise
    except Exception as error:
        raise KvtuneError(
            f"{base} says what kvtune cannot read ({type(error).__name__}: {one_line(reason(error))})",
            "check that the URL is a vLLM server's",
        ) from error


def named(name: Hash) -> str:
    """Return a block's short name: the last 8 hex digits of its hash."""
    return f"{name & 0xFFFFFFFF:08x}" if isinstance(name, int) else name[-4:].hex()


def _times(between: Between, name: str) -> Times:
    median, high = between.quantile(name, 0.5), between.quantile(name, 0.99)
    return Times(*(None if value is None else 1000.0 * value for value in (median, high)))
