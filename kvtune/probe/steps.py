"""Spans around EngineCore's step and the scheduler's two host parts: one STEP record per executed step.

Runs in EngineCore's main loop. Fields: small = 1 with a batch queue (schedule and update then belong to different
batches), number = requests scheduled; v0 start ns, v1 step ns, v2 schedule ns, v3 execute ns (from the end of
schedule to the start of update), v4 update ns, v5 thread CPU ns, v6 scheduled tokens | prefill tokens << 32,
v7 running | waiting << 32, v8 free blocks, v9 context tokens. With `digests`, a DIGEST record for each schedule()
too: v0 ns, v1 one number for what was scheduled into which blocks (tests compare it with the simulator's).
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns, thread_time_ns
from typing import Any, Protocol

from kvtune.probe.digest import digest
from kvtune.probe.ring import DIGEST, STEP, Ring


class StepSampler(Protocol):
    """An instrument that works at some steps, outside the measured times."""

    def begin(self) -> None: ...
    def output_is_in(self) -> None: ...
    def end(self) -> None: ...


class StepProbe:
    """Wraps one scheduler's methods and the EngineCore loop's step. Disables its own bookkeeping on any failure."""

    def __init__(self, ring: Ring, *, digests: bool = False) -> None:
        self._ring = ring
        self._digests = digests
        self.failed = self.sampler_failed = ""
        self.after_step: Callable[[], None] | None = None
        self.sampler: StepSampler | None = None
        self._scheduler: Any = None
        self._schedule = self._update = (0, 0)
        self._output: Any = None

    def wrap_scheduler(self, scheduler: Any) -> None:
        """Instance attributes: no class is changed, so a second engine in this process is not measured twice."""
        self._scheduler = scheduler
        # Looked up at each call: the core may change the scheduler's class after this.
        kind = type

        def timed_schedule(*args: Any, **kwargs: Any) -> Any:
            start = monotonic_ns()
            output = kind(scheduler).schedule(scheduler, *args, **kwargs)
            self._schedule = (start, monotonic_ns())
            self._output = output
            if self._digests and output.total_num_scheduled_tokens:
                self._ring.write(DIGEST, 0, 0, (start, digest(output), 0, 0, 0, 0, 0, 0, 0, 0))
            return output

        def timed_update(*args: Any, **kwargs: Any) -> Any:
            if self.sampler is not None:
                self._tell("output_is_in")
            start = monotonic_ns()
            result = kind(scheduler).update_from_output(scheduler, *args, **kwargs)
            self._update = (start, monotonic_ns())
            return result

        scheduler.schedule = timed_schedule
        scheduler.update_from_output = timed_update

    def wrap_loop(self, step: Callable[[Any], bool]) -> Callable[[Any], bool]:
        """The replacement for `EngineCoreProc._process_engine_step`: same result, one record."""

        def timed_step(engine: Any) -> bool:
            if self.failed or self._scheduler is None:
                return step(engine)
            if self.sampler is not None:
                self._tell("begin")
            cpu_start = thread_time_ns()
            start = monotonic_ns()
            executed = step(engine)
            end = monotonic_ns()
            if self.sampler is not None:
                self._tell("end")
            try:
                if executed and self._output is not None:
                    self._record(start, end, thread_time_ns() - cpu_start, engine.batch_queue is not None)
                if self.after_step is not None:
                    self.after_step()
            except Exception as error:
                self.failed = f"{type(error).__name__}: {error}"
            self._output = None
            return executed

        return timed_step

    def _tell(self, moment: str) -> None:
        """A sampler that raises is dropped; the steps go on."""
        try:
            getattr(self.sampler, moment)()
        except Exception as error:
            self.sampler = None
            self.sampler_failed = f"{type(error).__name__}: {error}"

    def _record(self, start: int, end: int, cpu: int, queued: bool) -> None:
        output, scheduler = self._output, self._scheduler
        schedule_start, schedule_end = self._schedule
        update_start, update_end = self._update
        updated = update_end - update_start if update_start >= start else 0
        if queued:
            execute = end - start - (schedule_end - schedule_start) - updated
        else:
            execute = max(0, update_start - schedule_end)
        cached = output.scheduled_cached_reqs
        total = output.total_num_scheduled_tokens
        requests = len(output.num_scheduled_tokens)
        context = sum(cached.num_computed_tokens)
        # A running request that has produced output decodes; everything else in the step is prefill.
        decodes = len(cached.req_ids) - cached.num_output_tokens.count(0)
        prefill = total - decodes
        for new in output.scheduled_new_reqs:
            context += new.num_computed_tokens
        self._ring.write(
            STEP,
            int(queued),
            requests,
            (
                start,
                end - start,
                schedule_end - schedule_start,
                execute,
                updated,
                cpu,
                total | max(0, prefill) << 32,
                len(scheduler.running) | len(scheduler.waiting) << 32,
                scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
                context,
            ),
        )
