"""Times EngineCore's step, `schedule` and `update_from_output`: one Step record per executed step.

Runs in EngineCore's main loop. A step that evicted or demoted KV blocks has a PoolChange record after it. With
`digests`, each schedule() writes a Digest record, which tests compare with the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable
from gc import get_count
from itertools import compress
from operator import not_
from time import monotonic_ns, thread_time_ns
from typing import Protocol

from kvtune.core.vllm_types import EngineCore, Scheduler, SchedulerOutput
from kvtune.probe.digest import digest
from kvtune.probe.gc import CollectorProbe
from kvtune.probe.pool import PoolWatch
from kvtune.probe.records import Digest, PoolChange, Step
from kvtune.probe.ring import Ring


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

        self._steady: tuple[int, str | None, str | None] = (0, None, None)
        self._context = self._prefill_context = 0
        self._preempted: set[str] = set()  # requests that have output and prefill once more

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
        total = output.total_num_scheduled_tokens
        requests = len(output.num_scheduled_tokens)
        prefill = self._follow(output, total, requests, len(scheduler.running))
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self._ring.write(
            Step(
                queued=queued,
                requests=requests,
                start_ns=start,
                step_ns=end - start,
                schedule_ns=schedule_end - schedule_start,
                execute_ns=execute,
                update_ns=updated,
                cpu_ns=cpu,
                scheduled_tokens=total,
                prefill_tokens=prefill,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                free_blocks=free,
                context_tokens=self._context,
                prefill_context_tokens=self._prefill_context,
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

    def _follow(self, output: SchedulerOutput, total: int, requests: int, running: int) -> int:
        """Prefill tokens of a step; updates the context tokens. Walks no list while the same requests decode."""
        cached = output.scheduled_cached_reqs
        ids = cached.req_ids
        if (
            total == requests == len(ids) == running == self._steady[0]
            and not output.scheduled_new_reqs
            and not output.finished_req_ids
            and not output.preempted_req_ids
            and not cached.resumed_req_ids
            and (ids[0], ids[-1]) == self._steady[1:]
        ):
            self._context += total
            return 0
        computed, produced = cached.num_computed_tokens, cached.num_output_tokens
        context, prefill_context = sum(computed), 0
        # A running request with output decodes; everything else in the step is prefill.
        prefills = produced.count(0)
        decodes = len(ids) - prefills
        if prefills:
            prefill_context = sum(compress(computed, map(not_, produced)))
        if output.preempted_req_ids:
            self._preempted |= output.preempted_req_ids
        if self._preempted:
            again = self._prefilling_again(output)
            decodes -= len(again)
            prefill_context += sum(again)
        for new in output.scheduled_new_reqs:
            prefill_context += new.num_computed_tokens
            context += new.num_computed_tokens
        self._context, self._prefill_context = context, prefill_context
        steady = total == decodes == requests
        self._steady = (total, ids[0], ids[-1]) if steady and ids else (0, None, None)
        return int(max(0, total - decodes))

    def _prefilling_again(self, output: SchedulerOutput) -> list[int]:
        """Computed tokens of each request in this step that was preempted and does not decode again yet."""
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        self._preempted -= output.finished_req_ids
        prefilling: list[int] = []
        for name, computed, produced in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            # A request without output counts as prefill anyway.
            if name not in self._preempted or not produced:
                continue
            if scheduled[name] == 1 or name in output.scheduled_spec_decode_tokens:
                self._preempted.discard(name)
            else:
                prefilling.append(computed)
        return prefilling
