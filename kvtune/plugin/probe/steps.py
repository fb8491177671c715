"""Times EngineCore's steps: one Step record for each executed batch, written once its tokens have arrived.

Runs in EngineCore's main loop. With a batch queue, one turn (pass of the loop) schedules one batch and takes the tokens
of another: the record describes the batch whose tokens came, with the time of all turns since the previous record. A
PoolChange record follows a step that evicted KV blocks, a Copies record a turn in which a tier of host memory copied
something. With `digests`, each schedule() writes a Digest record, which tests compare with the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from gc import get_count
from threading import get_ident
from time import monotonic_ns, thread_time_ns
from typing import TYPE_CHECKING, TypeVar

from kvtune.plugin.probe.gc import CollectorProbe
from kvtune.plugin.probe.offload import OffloadWatch, offload_watch
from kvtune.plugin.probe.pool import PoolWatch
from kvtune.plugin.probe.preempted import Preempted
from kvtune.plugin.probe.records import Digest, PoolChange, Recomputed, Step
from kvtune.plugin.probe.ring import Ring
from kvtune.plugin.probe.work import Work, WorkFollower, digest
from kvtune.plugin.vllm.types import EngineCore, Outputs, Scheduler, SchedulerOutput
from kvtune.plugin.vllm.waits import Future, watch_waits

if TYPE_CHECKING:
    from kvtune.plugin.probe.objects.step_sites import StepSites

Made = TypeVar("Made")


@dataclass(slots=True)
class Batch:
    """A scheduled batch whose tokens have not arrived. It keeps `output` alive, so that its id() stays unique."""

    output: SchedulerOutput
    work: Work
    given_ns: int
    """When the batch was scheduled; the device gets it at once."""


@dataclass(slots=True)
class Turns:
    """Times (ns) and objects made in the turns since the last record. `step_ns`: since the start of the first turn."""

    start_ns: int = 0
    step_ns: int = 0
    schedule_ns: int = 0
    update_ns: int = 0
    wait_ns: int = 0
    cpu_ns: int = 0
    made: int = 0
    schedule_made: int = 0
    execute_made: int = 0
    update_made: int = 0


class StepProbe:
    """Wraps one scheduler's methods and the step of EngineCore's loop. Switches itself off at its first failure."""

    def __init__(self, ring: Ring, *, collector: CollectorProbe | None = None, digests: bool = False) -> None:
        self._ring = ring
        self._collector = collector if collector is not None else CollectorProbe(ring)
        self._digests = digests
        self.failed = ""
        self.disabled: dict[str, str] = {}
        """Why others of its instruments do not run, by name."""
        self.preempted: Preempted | None = None
        self.pool: PoolWatch | None = None
        self.offload: OffloadWatch | None = None
        self.after_step: Callable[[], None] | None = None
        self.sampler: StepSites | None = None
        """Called in each step, outside the measured times."""
        self._scheduler: Scheduler | None = None
        self._executor: object = None
        self._work = WorkFollower()
        self._in_flight: dict[int, Batch] = {}  # by id of the output
        self._turns = Turns()
        self._done: Batch | None = None
        self._done_ns = self._before_ns = 0
        """When the tokens of the last batch, and of the batch before it, arrived."""
        self._scheduled_made = 0

    def wrap_scheduler(self, scheduler: Scheduler) -> None:
        """Wrap methods of the object, not the class, so that a second engine here is not measured twice."""
        self._scheduler = scheduler
        self.pool = self._made("pool", lambda: PoolWatch(scheduler.kv_cache_manager.block_pool))
        self.offload = self._made("offload", lambda: offload_watch(scheduler.connector, monotonic_ns))
        self.preempted = self._made("preempted", lambda: Preempted(scheduler, strict=False))
        # The class is looked up at each call: the core may change it later. A test may already wrap this object.
        kind, collector = type, self._collector
        audited = vars(scheduler).get("update_from_output")

        def timed_schedule(*args: object, **kwargs: object) -> SchedulerOutput:
            made = collector.counted + get_count()[0]
            start = monotonic_ns()
            output: SchedulerOutput = kind(scheduler).schedule(scheduler, *args, **kwargs)
            end = monotonic_ns()
            turns = self._turns
            turns.schedule_ns += end - start
            self._scheduled_made = collector.counted + get_count()[0]
            turns.schedule_made += self._scheduled_made - made
            if self.preempted is not None:
                self._note_preempted(self.preempted, output)
            if output.total_num_scheduled_tokens and not self.failed:
                self._follow(output, end)
                if self._digests:
                    self._ring.write(Digest(start, digest(output)))
            return output

        def timed_update(output: SchedulerOutput, *args: object, **kwargs: object) -> Outputs:
            if self.sampler is not None:
                self._notify("output_is_in")
            made = collector.counted + get_count()[0]
            start = monotonic_ns()
            result = (
                audited(output, *args, **kwargs)
                if audited is not None
                else kind(scheduler).update_from_output(scheduler, output, *args, **kwargs)
            )
            end = monotonic_ns()
            turns = self._turns
            turns.update_ns += end - start
            turns.update_made += collector.counted + get_count()[0] - made
            turns.execute_made += made - self._scheduled_made
            if self.preempted is not None:
                self._note_preempted(self.preempted)
            batch = self._in_flight.pop(id(output), None)
            if batch is not None:
                self._done, self._before_ns, self._done_ns = batch, self._done_ns, start
            return result

        scheduler.schedule = timed_schedule
        scheduler.update_from_output = timed_update

    def _made(self, name: str, make: Callable[[], Made]) -> Made | None:
        """Return what `make` does; None if it raises."""
        try:
            return make()
        except Exception as error:
            self.disabled[name] = f"{type(error).__name__}: {error}"
            return None

    def _note_preempted(self, preempted: Preempted, output: SchedulerOutput | None = None) -> None:
        """Note which preempted requests go on in a scheduled batch; without one, what those that ended computed twice.

        Requests are named by their number in the load, to which vLLM may add a dash and a random word.
        """
        try:
            if output is not None:
                preempted.scheduled(output)
                return
            for name, causes in preempted.ended().items():
                number = name.partition("-")[0]
                if number.isascii() and number.isdigit() and len(number) < 10:
                    self._ring.write(Recomputed(int(number), monotonic_ns(), **causes))
        except Exception as error:
            preempted.stop(error)
        if preempted.failed:
            self.preempted, self.disabled["preempted"] = None, preempted.failed

    def wrap_loop(self, step: Callable[[EngineCore], bool]) -> Callable[[EngineCore], bool]:
        """Wrap `EngineCoreProc._process_engine_step`: the result is the same, and records are written."""

        collector = self._collector

        def timed_step(engine: EngineCore) -> bool:
            if self.failed or self._scheduler is None:
                return step(engine)
            if self._executor is not engine.model_executor:
                self._watch(engine.model_executor)
            if self.sampler is not None:
                self._notify("begin")
            turns = self._turns
            made = collector.counted + get_count()[0]
            cpu_start = thread_time_ns()
            start = monotonic_ns()
            executed = step(engine)
            end = monotonic_ns()
            if self.sampler is not None:
                self._notify("end")
            try:
                turns.start_ns = turns.start_ns or start
                turns.step_ns = end - turns.start_ns
                turns.cpu_ns += thread_time_ns() - cpu_start
                turns.made += collector.counted + get_count()[0] - made
                if self._done is not None:
                    self._record(self._scheduler, self._done, engine.batch_queue is not None)
                if self._done is not None or not self._in_flight:
                    # Times that are left over belong to no batch, and must not be added to a later one.
                    self._turns, self._done = Turns(), None
                if self.offload is not None and (copies := self.offload.news(start)) is not None:
                    self._ring.write(copies)
                if self.after_step is not None:
                    self.after_step()
            except Exception as error:
                self.failed = f"{type(error).__name__}: {error}"
            return executed

        return timed_step

    def _follow(self, output: SchedulerOutput, at_ns: int) -> None:
        try:
            self._in_flight[id(output)] = Batch(output, self._work.follow(output), at_ns)
        except Exception as error:
            self.failed = f"{type(error).__name__}: {error}"

    def _watch(self, executor: object) -> None:
        """Measure how long EngineCore waits for this executor's results, without collections in that time."""
        self._executor, collector = executor, self._collector

        def timed_wait(future: Future) -> object:
            thread = get_ident()
            paused = collector.paused_ns.get(thread, 0)
            start = monotonic_ns()
            try:
                return future.result()
            finally:
                waited = monotonic_ns() - start
                self._turns.wait_ns += waited - (collector.paused_ns.get(thread, 0) - paused)

        self._made("wait", lambda: watch_waits(executor, timed_wait))

    def _notify(self, moment: str) -> None:
        """Call the sampler; a sampler that raises is removed."""
        try:
            getattr(self.sampler, moment)()
        except Exception as error:
            self.sampler = None
            self.disabled["step_sites"] = f"{type(error).__name__}: {error}"

    def _record(self, scheduler: Scheduler, batch: Batch, queued: bool) -> None:
        turns, work = self._turns, batch.work
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        self._ring.write(
            Step(
                queued=queued,
                requests=work.requests,
                start_ns=turns.start_ns,
                step_ns=turns.step_ns,
                schedule_ns=turns.schedule_ns,
                # Without a queue: from the end of schedule to the start of update.
                execute_ns=turns.step_ns - turns.schedule_ns - turns.update_ns
                if queued
                else max(0, self._done_ns - batch.given_ns),
                update_ns=turns.update_ns,
                wait_ns=-1 if "wait" in self.disabled else turns.wait_ns,
                device_ns=self._done_ns - max(batch.given_ns, self._before_ns),
                cpu_ns=turns.cpu_ns,
                scheduled_tokens=work.scheduled,
                prefill_tokens=work.prefill,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                free_blocks=free,
                context_tokens=work.context_tokens,
                prefill_context_tokens=work.prefill_context_tokens,
                schedule_objects=turns.schedule_made,
                execute_objects=0 if queued else turns.execute_made,
                update_objects=turns.update_made,
                other_objects=turns.made
                - turns.schedule_made
                - turns.update_made
                - (0 if queued else turns.execute_made),
                preempted=len(batch.output.preempted_req_ids or ()),
            )
        )
        if self.pool is not None and (evicted := self.pool.news()) is not None:
            self._ring.write(PoolChange(free, turns.start_ns, evicted))
