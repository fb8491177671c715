"""One run with all results that are computed from it, each once; `--json`, the page and the console share them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from kvtune.data.run.types import Run
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
from kvtune.reading.analysis.host import ceiling, cost, overlap
from kvtune.reading.analysis.stalls import account
from kvtune.reading.analysis.verdict import Verdict
from kvtune.requests.types import Workload

Result = TypeVar("Result")


def _result(compute: Callable[[RunAnalysis], Result]) -> cached_property[Result]:
    """Return a property that is computed when it is first read."""
    return cached_property(compute)


@dataclass(frozen=True, eq=False)
class RunAnalysis:
    """A run's results, each computed when first read. Without the workload, causes of misses are not classified."""

    run: Run
    workload: Workload | None = None
    file: str = ""
    """The run file's path, if it is known, for the commands that read it."""

    request_times = _result(lambda self: latency.request_times(self.run))
    latency = _result(lambda self: latency.latency(self.run, self.request_times))
    goodput = _result(lambda self: latency.goodput(self.run, self.request_times))
    prefix_cache = _result(lambda self: cache.prefix_cache(self.run, self.workload))
    offload = _result(lambda self: offload.offload(self.run))
    fleet = _result(lambda self: fleet.fleet(self.run))
    preemption = _result(lambda self: preemption.preemption(self.run))
    rounds = _result(lambda self: cache.rounds(self.run))
    hidden_steps = _result(lambda self: overlap.hidden_steps(self.run))
    step_time = _result(lambda self: step_time.step_time(self.run, self.hidden_steps))
    pauses_in_steps_ms = _result(lambda self: step_time.pauses_in_steps_ms(self.run))
    paused_steps = _result(lambda self: step_time.paused_steps(self.run, self.pauses_in_steps_ms))
    host_cost = _result(lambda self: cost.host_cost(self.run))
    overlap = _result(lambda self: overlap.overlap(self.run, self.hidden_steps))
    ceiling = _result(lambda self: ceiling.ceiling(self.run, self.overlap))
    no_ceiling = _result(lambda self: ceiling.unmeasured(self.run, self.overlap))
    collectors = _result(lambda self: gc.collectors(self.run))
    collections_in_steps = _result(lambda self: gc.join(self.run, self.pauses_in_steps_ms))
    stalls = _result(lambda self: account.stalls(self.run))
    culprits = _result(lambda self: culprits.culprits(self.run))
    memory = _result(lambda self: memory.memory(self.run))
    devices = _result(lambda self: memory.device_use(self.run))
    kv_bytes = _result(lambda self: memory.kv_bytes(self.run, self.pool_bytes or 0))

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
