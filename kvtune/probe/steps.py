"""Times EngineCore's step, `schedule` and `update_from_output`: one Step record per executed step.

Runs in EngineCore's main loop. A step that evicted or demoted KV blocks has a PoolChange record after it. With
`digests`, each schedule() writes a Digest record, which tests compare with the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable
from gc import get_count
from time import monotonic_ns, thread_time_ns
from typing import Protocol

from kvtune.core.vllm_types import EngineCore, Scheduler, SchedulerOutput
from kvtune.probe.digest import digest
from kvtune.probe.gc import CollectorProbe
from kvtune.probe.pool import PoolWatch
from kvtune.probe.records import Digest, PoolChange, Step
from kvtune.probe.ring import Ring
from kvtune.probe.work import WorkFollower


class StepSampler(Protocol):
    """An instrument that is called in each step, outside the measured times."""

    def begin(self) -> None: ...
    def output_is_in(self) -> None: ...
    def end(self) -> None: ...


class StepProbe:
    """Wraps one scheduler's methods and the step of EngineCore's loop. Switches itself off at its first failure."""

    def __init__(self, ring: Ring, *, collector: CollectorProbe | None = None, digests: bool = False) -> None:
        self._ring = ring
        self._collector = collector if collector is not None else CollectorProbe(ring)
        self._digests = digests
        self.failed = self.sampler_failed = self.pool_failed = ""
        self.pool: PoolWatch | None = None
        self.after_step: Callable[[], None] | None = None
        self.sampler: StepSampler | None = None
        self._scheduler: Scheduler | None = None
        self._schedule = self._update = (0, 0, 0, 0)  # start and end in ns, then objects made so far at both
        self._output: SchedulerOutput | None = None

        self._work = WorkFollower()

    def wrap_scheduler(self, scheduler: Scheduler) -> None:
        """Replace methods on the instance, so that a second engine in this process is not measured twice."""
        self._scheduler = scheduler
        try:
            self.pool = PoolWatch(scheduler.kv_cache_manager.block_pool)
        except Exception as error:
            self.pool_failed = f"{type(error).__name__}: {error}"
        # The class is looked up at each call: the core may change it after this.
        kind, collector = type, self._collector

        def timed_schedule(*args: object, **kwargs: object) -> SchedulerOutput:
            made = collector.counted + get_count()[0]
            start = monotonic_ns()
            output: SchedulerOutput = kind(scheduler).schedule(scheduler, *args, **kwargs)
            end = monotonic_ns()
            self._schedule = (start, end, made, collector.counted + get_count()[0])
            self._output = output
            if self._digests and output.total_num_scheduled_tokens:
                self._ring.write(Digest(start, digest(output)))
            return output

        def timed_update(*args: object, **kwargs: object) -> object:
            if self.sampler is not None:
                self._notify("output_is_in")
            made = collector.counted + get_count()[0]
            start = monotonic_ns()
            result: object = kind(scheduler).update_from_output(scheduler, *args, **kwargs)
            end = monotonic_ns()
            self._update = (start, end, made, collector.counted + get_count()[0])
            return result

        scheduler.schedule = timed_schedule
        scheduler.update_from_output = timed_update

    def wrap_loop(self, step: Callable[[EngineCore], bool]) -> Callable[[EngineCore], bool]:
        """A replacement for `EngineCoreProc._process_engine_step`: the same result, and one record."""

        collector = self._collector

        def timed_step(engine: EngineCore) -> bool:
            if self.failed or self._scheduler is None:
                return step(engine)
            if self.sampler is not None:
                self._notify("begin")
            made = collector.counted + get_count()[0]
            cpu_start = thread_time_ns()
            start = monotonic_ns()
            executed = step(engine)
            end = monotonic_ns()
            if self.sampler is not None:
                self._notify("end")
            try:
                if executed and (output := self._output) is not None:
                    cpu = thread_time_ns() - cpu_start
                    made = collector.counted + get_count()[0] - made
                    self._record(
                        self._scheduler, output, start, end, cpu, made, engine.batch_queue is not None
                    )
                if self.after_step is not None:
                    self.after_step()
            except Exception as error:
                self.failed = f"{type(error).__name__}: {error}"
            self._output = None
            return executed

        return timed_step

    def _notify(self, moment: str) -> None:
        """Call the sampler; one that raises is removed."""
        try:
            getattr(self.sampler, moment)()
        except Exception as error:
            self.sampler = None
            self.sampler_failed = f"{type(error).__name__}: {error}"

    def _record(
        self,
        scheduler: Scheduler,
        output: SchedulerOutput,
        start: int,
        end: int,
        cpu: int,
        made: int,
        queued: bool,
    ) -> None:
        schedule_start, schedule_end, made_before_schedule, made_at_schedule = self._schedule
        update_start, update_end, made_before_update, made_at_update = self._update
        schedule_made = made_at_schedule - made_before_schedule
        updated = update_made = execute_made = 0
        if update_start >= start:
            updated, update_made = update_end - update_start, made_at_update - made_before_update
            execute_made = 0 if queued else made_before_update - made_at_schedule
        if queued:
            execute = end - start - (schedule_end - schedule_start) - updated
        else:
            execute = max(0, update_start - schedule_end)
        work = self._work.follow(output)
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self._ring.write(
            Step(
                queued=queued,
                requests=work.requests,
                start_ns=start,
                step_ns=end - start,
                schedule_ns=schedule_end - schedule_start,
                execute_ns=execute,
                update_ns=updated,
                cpu_ns=cpu,
                scheduled_tokens=work.scheduled,
                prefill_tokens=work.prefill,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                free_blocks=free,
                context_tokens=work.context_tokens,
                prefill_context_tokens=work.prefill_context_tokens,
                schedule_objects=schedule_made,
                execute_objects=execute_made,
                update_objects=update_made,
                other_objects=made - schedule_made - execute_made - update_made,
                preempted=len(output.preempted_req_ids or ()),
            )
        )
        if self.pool is not None and (change := self.pool.news()) is not None:
            evicted, demoted = change
            self._ring.write(PoolChange(free, start, tuple(evicted), tuple(demoted)))
