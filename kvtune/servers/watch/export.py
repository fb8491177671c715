"""Exports a server's hits and misses to Prometheus: `kvtune watch URL --metrics PORT`.

In: one snapshot after another. Out: counters that begin at 0 when kvtune joins and never fall while it runs, even if
the server restarts. At every scrape the misses of all causes add up to prompt tokens minus hit tokens.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.resources import files

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.causes import OTHER_REPLICA, PUBLISHED
from kvtune.servers.watch.counts import Counts
from kvtune.servers.watch.servers import FleetSnapshot, Servers
from kvtune.servers.watch.snapshot import Snapshot

LOOK_S = 0.5


def board() -> str:
    """Return the Grafana board, as JSON."""
    return files("kvtune.servers.watch").joinpath("dashboards/kvtune.json").read_text()


def alerts() -> str:
    """Return Prometheus' alert rules, as YAML."""
    return files("kvtune.servers.watch").joinpath("dashboards/alerts.yml").read_text()


class Exporter(Collector):
    """Looks at the servers every `look_s`, and answers scrapes with the newest look. `servers` makes what looks."""

    def __init__(
        self, servers: Callable[[], Servers], say: Callable[[str], None], look_s: float = LOOK_S
    ) -> None:
        self._new = servers
        self._look_s = look_s
        self._say = say
        self._servers: Servers | None = None
        self._highest: Counter[str] = Counter()
        """What a fleet's funnel reached: its bounds may fall, and counters do not."""
        self._begun = Counts()
        """What was counted up to the first look."""
        self._metrics: list[Metric] = list(_metrics(None, Counts()))
        self._problem = ""

    def run(self, port: int, host: str = "127.0.0.1", stop: threading.Event | None = None) -> None:
        """Serve the metrics until `stop` is set, or an exception such as Ctrl-C."""
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
                stop.wait(self._look_s)
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
            self._metrics = self._made(None)
            return
        if self._problem:
            self._say(f"{shot.url if isinstance(shot, Snapshot) else 'a server'} answers")
        self._problem = ""
        self._metrics = self._made(shot)

    def _made(self, shot: Snapshot | FleetSnapshot | None) -> list[Metric]:
        if isinstance(shot, FleetSnapshot):
            return list(_of_fleet(shot, self._highest))
        now = self._servers.only.watched.totals if self._servers is not None else Counts()
        return list(_metrics(shot, now - self._begun))

    def _look(self) -> Snapshot | FleetSnapshot:
        if self._servers is not None:
            return self._servers.look()
        made = self._new()
        try:
            made.start()
        except BaseException:
            made.close()
            raise
        self._servers = made
        if made.alone:
            self._begun = made.only.watched.totals.copied()
        return made.snapshot()

    def close(self) -> None:
        if self._servers is not None:
            self._servers.close()

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics

    def describe(self) -> Iterator[Metric]:
        yield from ()


def _of_fleet(shot: FleetSnapshot, highest: Counter[str]) -> Iterator[Metric]:
    """Yield the metrics of several servers. Counters begin as the rows of `kvtune watch` do; of a range, the least."""
    for name, text, labels in (
        ("missed_tokens", "Prompt tokens that the prefix cache did not have, by cause", ["server", "cause"]),
        ("prompt_tokens", "Prompt tokens that were looked up in the prefix cache", ["server"]),
        ("hit_tokens", "Prompt tokens that the prefix cache had", ["server"]),
        ("evicted_blocks", "Cached blocks that were evicted, by the KV events", ["server"]),
        (
            OTHER_REPLICA + "_tokens",
            "Prompt tokens that another server had computed, this one never",
            ["server"],
        ),
    ):
        family = CounterMetricFamily(f"kvtune_{name}", text, labels=labels)
        for server in shot.servers:
            causes = {cause: tokens for cause, tokens in server.misses.items() if cause != "computing"}
            counts = {
                "prompt_tokens": server.hit_tokens + sum(causes.values()),
                "hit_tokens": server.hit_tokens,
                "evicted_blocks": server.evicted_blocks,
                f"{OTHER_REPLICA}_tokens": causes.get(OTHER_REPLICA, 0),
            }
            if name in counts:
                family.add_metric([server.url], counts[name])
            else:
                for cause in sorted({*PUBLISHED, *causes}):
                    family.add_metric([server.url, cause], causes.get(cause, 0))
        yield family
    for name, text, tokens in (
        ("prompt", "Prompt tokens of all servers that are compared", shot.fleet.prompt_tokens),
        ("as_routed", "Those that hit", shot.fleet.as_routed),
        (
            "best_replica",
            "Those that hit at the server with most of each, at least",
            shot.fleet.best_replica.least,
        ),
        ("everything", "Those that hit if every server had kept all, at least", shot.fleet.everything.least),
    ):
        highest[name] = max(highest[name], tokens)
        yield CounterMetricFamily(f"kvtune_fleet_{name}_tokens", text, highest[name])
    up = GaugeMetricFamily("kvtune_server_up", "1: the server answered the last look", labels=["server"])
    for server in shot.servers:
        up.add_metric([server.url], server.down_since is None)
    yield up


def _metrics(shot: Snapshot | None, counts: Counts) -> Iterator[Metric]:
    """Yield the metrics: `counts` since the first look. A miss is counted when its cause is known.

    `shot` None: the server cannot be reached. Counters keep their values, and only the gauge `server_up` is left.
    """
    causes, hits = counts.missed, counts.hits
    missed = CounterMetricFamily(
        "kvtune_missed_tokens",
        "Prompt tokens that the prefix cache did not have, by cause; all causes add up to prompt - hit",
        labels=["cause"],
    )
    for cause in sorted({*PUBLISHED, *causes}):
        missed.add_metric([cause], causes[cause])
    yield missed
    for name, text, count in (
        ("prompt_tokens", "Prompt tokens that were looked up in the prefix cache", hits + causes.total()),
        (
            "hit_tokens",
            "Prompt tokens that the prefix cache had, those that a connector loaded among them",
            hits,
        ),
        ("loaded_tokens", "Prompt tokens that a connector loaded", counts.loaded),
        (
            "recomputed_tokens",
            "Tokens that were computed again after preemption, which are no misses",
            counts.recomputed,
        ),
        ("evicted_blocks", "Cached blocks that were evicted, by the KV events", counts.evicted),
        ("preemptions", "Requests that were preempted", counts.preemptions),
        (
            "lost_event_batches",
            "Batches of KV events that were lost, or could not be read",
            counts.lost,
        ),
    ):
        yield CounterMetricFamily(f"kvtune_{name}", f"{text}, since kvtune joined", count)
    yield GaugeMetricFamily("kvtune_server_up", "1: the server answered the last look", shot is not None)
    if shot is None:
        return
    for name, text, value in (
        ("running_requests", "Requests that the engines compute", shot.running),
        ("waiting_requests", "Requests that wait to be scheduled", shot.waiting),
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
