"""The account of a running server as Prometheus metrics: `kvtune watch URL --metrics PORT`.

In: one snapshot after another. Out: counters that never fall while kvtune runs, also where the server starts anew, and
the causes of whose misses add up to prompt - hit at every scrape. They begin at 0 when kvtune joins.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvtune.errors import KvtuneError, UsageError
from kvtune.watch.account import RECOMPUTED
from kvtune.watch.watching import Snapshot, Watching

LOOK_S = 0.5
SETTLE_S = 10.0
"""Misses and events wait so long for each other."""
CAUSES = (*RECOMPUTED, "tails")


def board() -> str:
    """The Grafana board, as JSON."""
    return files("kvtune.watch").joinpath("dashboards/kvtune.json").read_text()


def alerts() -> str:
    """Prometheus' alert rules, as YAML."""
    return files("kvtune.watch").joinpath("dashboards/alerts.yml").read_text()


@dataclass(frozen=True, slots=True)
class _Come:
    """What had come up to a look: the server's misses, tokens of events, event batches that were lost."""

    at: float
    misses: int
    tokens: int
    lost: int


@dataclass
class Totals:
    """Counts since the first look. A miss is counted when its cause is known.

    A prompt that is computed in several steps is looked up at once, and its events come step by step: what a look
    missed cannot be divided by the events of that look. So misses and events wait for each other. A miss without an
    event after `settle` seconds is a tail; unknown, where events are off, or were lost meanwhile. Tokens without a miss
    after that time were computed again after preemption, which the server does not count.
    """

    settle: float = SETTLE_S
    hits: int = 0
    preemptions: int = 0
    evicted: int = 0
    lost: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    recomputed: int = 0
    _misses: int = 0
    """That the server counted; those whose cause is known are in `missed`."""
    _taken: Counter[str] = field(default_factory=Counter)
    """Tokens of events that were counted, by cause."""
    _before: Snapshot | None = None
    _tokens: Counter[str] = field(default_factory=Counter)
    _open: deque[_Come] = field(default_factory=deque)

    def add(self, shot: Snapshot, tokens: Mapping[str, int]) -> None:
        """`tokens`: the account's, by cause, with those of the history that was read at the start."""
        before, self._before = self._before, shot
        if before is None:
            self._tokens = Counter(tokens)
            self._open.append(_Come(shot.at, 0, 0, 0))
            return
        anew = shot.restarts > before.restarts
        asked, hit, preempted = (
            max(0, now - (0 if anew else then))
            for now, then in (
                (shot.query_tokens, before.query_tokens),
                (shot.hit_tokens, before.hit_tokens),
                (shot.preemptions or 0, before.preemptions or 0),
            )
        )
        self.hits += min(hit, asked)
        self._misses += asked - min(hit, asked)
        self.preemptions += preempted
        self.evicted += max(0, shot.evicted_blocks - before.evicted_blocks)
        self.lost += max(0, _lost(shot) - _lost(before))
        came = Counter(tokens) - self._tokens
        del came["answers"]
        self._open.append(_Come(shot.at, self._misses, came.total(), self.lost))
        self._judge(came)
        self._settle(came, shot)

    def _judge(self, came: Mapping[str, int]) -> None:
        """Misses get the causes of the events that came, recomputation's likely causes last."""
        room = self._misses - self.missed.total()
        for cause in sorted(came, key=lambda cause: -RECOMPUTED.index(cause)):
            more = min(room, came[cause] - self._taken[cause])
            self._taken[cause] += more
            self.missed[cause] += more
            room -= more

    def _settle(self, came: Mapping[str, int], shot: Snapshot) -> None:
        """What has waited long enough, of misses or of events: never of both."""
        while len(self._open) > 1 and self._open[1].at <= shot.at - self.settle:
            self._open.popleft()
        off = shot.events.state != "on"
        settled = self._open[-1] if off else self._open[0]
        silent = settled.misses - self.missed.total()
        if silent > 0:
            self.missed["unknown" if off or self.lost > settled.lost else "tails"] += silent
        over = settled.tokens - self._taken.total()
        for cause in RECOMPUTED:
            more = max(0, min(over, came.get(cause, 0) - self._taken[cause]))
            self._taken[cause] += more
            self.recomputed += more
            over -= more

    @property
    def prompt(self) -> int:
        return self.hits + self.missed.total()


def _lost(shot: Snapshot) -> int:
    return shot.events.lost_batches + shot.events.unknown_messages


class Exporter(Collector):
    """Looks again and again, and answers scrapes with the newest look. `watching` makes one that has not started."""

    def __init__(
        self, watching: Callable[[], Watching], say: Callable[[str], None], settle: float = SETTLE_S
    ) -> None:
        self._new = watching
        self._say = say
        self._watching: Watching | None = None
        self._totals = Totals(settle)
        self._metrics: list[Metric] = list(_metrics(None, self._totals))
        self._problem = ""

    def run(self, port: int, host: str = "127.0.0.1", stop: threading.Event | None = None) -> None:
        """Until `stop`, or an exception such as Ctrl-C."""
        registry = CollectorRegistry()
        registry.register(self)
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise KvtuneError(
                f"cannot listen at {host}:{port}: {error.strerror or error}",
                "give another --metrics PORT or --metrics-host",
            ) from None
        stop = stop or threading.Event()
        try:
            self._say(f"metrics: http://{host}:{server.server_port}/metrics")
            while not stop.is_set():
                self.look()
                stop.wait(LOOK_S)
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
            self.close()

    def look(self) -> None:
        try:
            shot = self._look()
        except UsageError:
            raise
        except KvtuneError as error:
            if self._problem != error.message:
                self._say(f"{error.message}; asking again")
            self._problem = error.message
            self._metrics = list(_metrics(None, self._totals))
            return
        if self._problem:
            self._say(f"{shot.url} answers")
        self._problem = ""
        assert self._watching is not None
        self._totals.add(shot, self._watching.account.tokens)
        self._metrics = list(_metrics(shot, self._totals))

    def _look(self) -> Snapshot:
        if self._watching is not None:
            return self._watching.look()
        made = self._new()
        try:
            made.start()
        except BaseException:
            made.close()
            raise
        self._watching = made
        return made.snapshot()

    def close(self) -> None:
        if self._watching is not None:
            self._watching.close()

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics

    def describe(self) -> Iterator[Metric]:
        yield from ()


def _metrics(shot: Snapshot | None, totals: Totals) -> Iterator[Metric]:
    """Without a snapshot the server cannot be reached: counters stay, gauges of its state are not given."""
    missed = CounterMetricFamily(
        "kvtune_missed_tokens",
        "Prompt tokens that the prefix cache did not have, by cause; all causes add up to prompt - hit",
        labels=["cause"],
    )
    for cause in sorted({*CAUSES, *totals.missed}):
        missed.add_metric([cause], totals.missed[cause])
    yield missed
    for name, text, count in (
        ("prompt_tokens", "Prompt tokens that were looked up in the prefix cache", totals.prompt),
        ("hit_tokens", "Prompt tokens that the prefix cache had", totals.hits),
        (
            "recomputed_tokens",
            "Tokens that were computed again after preemption, which are no misses",
            totals.recomputed,
        ),
        ("evicted_blocks", "Cached blocks that were evicted, by the KV events", totals.evicted),
        ("preemptions", "Requests that were preempted", totals.preemptions),
        ("lost_event_batches", "Batches of KV events that were lost, or could not be read", totals.lost),
    ):
        yield CounterMetricFamily(f"kvtune_{name}", f"{text}, since kvtune joined", count)
    yield GaugeMetricFamily("kvtune_server_up", "1: the server answered the last look", shot is not None)
    if shot is None:
        return
    for name, text, value in (
        ("running_requests", "Requests that the engines compute", shot.running),
        ("waiting_requests", "Requests that wait for a seat or for blocks", shot.waiting),
        ("pool_use_ratio", "Share of the pool's blocks that running requests hold, 0 to 1", shot.pool_use),
        ("cached_blocks", "Blocks that the prefix cache holds, by the KV events", shot.cached_blocks),
        (
            "evicted_age_seconds",
            "Median time from storing to eviction, of blocks evicted in the last 10 s",
            shot.evicted_age_s,
        ),
        (
            "events_complete",
            "1: every KV event since the server's start was read; 0: some are missing, or events are off",
            float(shot.events.state == "on" and shot.events.complete),
        ),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"kvtune_{name}", text, value)
