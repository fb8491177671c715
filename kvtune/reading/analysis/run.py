"""One run with all results that are computed from it, each once; `--json`, the page and the console share them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvtune.data.run.types import Run
from kvtune.data.tally import Tally
from kvtune.reading.analysis import (
    cache,
    culprits,
    fleet,
    gc,
    latency,
    memory,
    offload,
    preemption,
    step_time,
    verdict,
)
from kvtune.reading.analysis.cache import Round
from kvtune.reading.analysis.culprits import Culprits
from kvtune.reading.analysis.fleet import Fleet
from kvtune.reading.analysis.gc import Collector, Join
from kvtune.reading.analysis.host import ceiling, cost, overlap
from kvtune.reading.analysis.host.ceiling import Ceiling
from kvtune.reading.analysis.host.cost import HostCost
from kvtune.reading.analysis.host.overlap import Hidden, Overlap
from kvtune.reading.analysis.latency import Latency, RequestTimes
from kvtune.reading.analysis.memory import DeviceUse, KvBytes, Memory
from kvtune.reading.analysis.offload import Offload
from kvtune.reading.analysis.preemption import Preemption
from kvtune.reading.analysis.spread import Values
from kvtune.reading.analysis.stalls import account
from kvtune.reading.analysis.stalls.account import Stalls
from kvtune.reading.analysis.step_time import PausedSteps, StepTime
from kvtune.reading.analysis.verdict import Verdict
from kvtune.requests.types import Workload


@dataclass(frozen=True, eq=False)
class RunAnalysis:
    """A run's results, each computed when first read. Without the workload, causes of misses are not classified."""

    run: Run
    workload: Workload | None = None
    file: str = ""
    """The run file's path, if it is known, for the commands that read it."""

    @cached_property
    def request_times(self) -> RequestTimes:
        return latency.request_times(self.run)

    @cached_property
    def latency(self) -> Latency:
        return latency.latency(self.run, self.request_times)

    @cached_property
    def goodput(self) -> dict[str, Any] | None:
        return latency.goodput(self.run, self.request_times)

    @cached_property
    def prefix_cache(self) -> Tally:
        return cache.prefix_cache(self.run, self.workload)

    @cached_property
    def offload(self) -> Offload | None:
        return offload.offload(self.run)

    @cached_property
    def fleet(self) -> Fleet | None:
        return fleet.fleet(self.run)

    @cached_property
    def preemption(self) -> Preemption | None:
        return preemption.preemption(self.run)

    @cached_property
    def rounds(self) -> list[Round]:
        return cache.rounds(self.run)

    @cached_property
    def step_time(self) -> StepTime:
        return step_time.step_time(self.run, self.hidden_steps)

    @cached_property
    def pauses_in_steps_ms(self) -> Values:
        return step_time.pauses_in_steps_ms(self.run)

    @cached_property
    def paused_steps(self) -> PausedSteps | None:
        return step_time.paused_steps(self.run, self.pauses_in_steps_ms)

    @cached_property
    def host_cost(self) -> HostCost:
        return cost.host_cost(self.run)

    @cached_property
    def hidden_steps(self) -> Hidden:
        return overlap.hidden_steps(self.run)

    @cached_property
    def overlap(self) -> Overlap | None:
        return overlap.overlap(self.run, self.hidden_steps)

    @cached_property
    def ceiling(self) -> Ceiling | None:
        return ceiling.ceiling(self.run, self.overlap)

    @property
    def no_ceiling(self) -> str:
        return ceiling.unmeasured(self.run, self.overlap)

    @cached_property
    def collectors(self) -> dict[str, Collector]:
        return gc.collectors(self.run)

    @cached_property
    def collections_in_steps(self) -> Join:
        return gc.join(self.run, self.pauses_in_steps_ms)

    @cached_property
    def stalls(self) -> Stalls:
        return account.stalls(self.run)

    @cached_property
    def culprits(self) -> dict[str, Culprits]:
        return culprits.culprits(self.run)

    @cached_property
    def memory(self) -> dict[str, Memory]:
        return memory.memory(self.run)

    @cached_property
    def devices(self) -> list[DeviceUse]:
        return memory.device_use(self.run)

    @cached_property
    def kv_bytes(self) -> KvBytes | None:
        return memory.kv_bytes(self.run, self.pool_bytes or 0)

    @cached_property
    def pool_bytes(self) -> int | None:
        """The KV pool's bytes; None if the run did not record its groups or its size."""
        engine = self.run.header.engine
        return engine.pool_bytes if engine.groups and engine.num_blocks else None

    @cached_property
    def verdict(self) -> Verdict:
        return verdict.verdict(
            self.run,
            self.latency,
            self.prefix_cache,
            self.step_time,
            self.stalls,
            self.overlap,
            self.ceiling,
            self.file,
        )
