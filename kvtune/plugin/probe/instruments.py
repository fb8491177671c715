"""Starts one process's instruments and their threads, and writes what they found into its status file.

Runs in vLLM's processes. An instrument that fails is switched off; the engine goes on, and `disabled` gives the reason.
"""

from __future__ import annotations

import _thread
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

from kvtune.plugin.core import state
from kvtune.plugin.probe.gc import CollectorProbe, Heap, collector_kind
from kvtune.plugin.probe.kv_specs import Layers
from kvtune.plugin.probe.phase import CULPRITS, OVER, STARTING, Phase
from kvtune.plugin.probe.ring import Ring
from kvtune.plugin.probe.status import Status, role
from kvtune.plugin.probe.steps import StepProbe
from kvtune.plugin.vllm.types import EngineCore, Scheduler

if TYPE_CHECKING:
    from kvtune.plugin.probe.objects.census import Census
    from kvtune.plugin.probe.objects.sites import Sites

STATUS_EVERY_S = 1.0
STATUS_POLL_S = 0.1
WATCH_EVERY_S = 0.05
SAVE_EVERY_S = 1.0

Action = Callable[[], None]


class Instruments:
    """The instruments of the process that made this object."""

    def __init__(self, folder: Path, level: str) -> None:
        self.pid = os.getpid()
        self.folder, self.level = folder, level
        self.status = Status(folder)
        self.phase: Phase | None = None
        self.collector: CollectorProbe | None = None
        self.steps: StepProbe | None = None
        self._heap: Heap | None = None
        self._loop: Callable[[EngineCore], bool] | None = None
        self._failed: dict[str, str] = {}
        self._stopped = False
        self.workers_specs: Layers = ()
        """Each worker's KV specs by layer, once EngineCore has asked for them."""

    def start(self) -> None:
        """Start the instruments of the level. May raise; the caller then calls `give_up`."""
        ring = Ring(self.folder / f"ring-{self.pid}.bin")
        self.phase = Phase(self.folder)
        self.collector = collector = CollectorProbe(ring)
        self._heap = Heap(self.phase)
        collector.listeners.append(self._heap)
        counts = None
        if self.level in ("types", "sites"):
            counts = self._start_object_counts(collector, self.phase)
        collector.install()
        self.steps = StepProbe(ring, collector=collector, digests=os.environ.get("KVTUNE_DIGESTS") == "1")
        if self.level == "sites" and role() == "engine_core":
            from kvtune.plugin.probe.objects.sites import Sites
            from kvtune.plugin.probe.objects.step_sites import StepSites

            if isinstance(counts, Sites):
                self.steps.sampler = StepSites(self.phase)
                counts.of_steps = self.steps.sampler.facts

    def stop(self) -> None:
        """Stop, so that the `Instruments` of a forked child can take over."""
        self._stopped = True
        if self.collector is not None:
            self.collector.remove()

    def give_up(self, error: Exception) -> None:
        """Go on without the step probe; `disabled` names the reason."""
        self.collector = self.steps = None
        self._failed["light"] = f"{type(error).__name__}: {error}"

    def report(self) -> None:
        """Write the status file, and start a thread that keeps it current."""
        self.status.facts["level"] = self.level
        self.status.facts["disabled"] = dict(self._failed)
        self.status.write()
        if self.phase is not None:
            _thread.start_new_thread(self._keep_status, (self.phase,))

    def disabled(self) -> dict[str, str]:
        """Return the reasons why instruments are not running, by name of the instrument."""
        collector, steps = self.collector, self.steps
        reasons = {"gc": collector.failed if collector else "", "steps": steps.failed if steps else ""}
        if steps is not None:
            reasons |= steps.disabled
        if collector is not None:
            reasons |= collector.failed_listeners
        return {name: why for name, why in (reasons | self._failed).items() if why}

    def watch_scheduler(self, scheduler: Scheduler) -> None:
        """Measure a scheduler that vLLM has just built, and describe its KV cache after its first step."""
        steps = self.steps
        if steps is None:
            return
        try:
            steps.wrap_scheduler(scheduler)
            self._loop = None
            steps.after_step = self._describe_once(steps, scheduler)
        except Exception as error:
            steps.failed = f"{type(error).__name__}: {error}"

    def run_step(self, step: Callable[[EngineCore], bool], engine: EngineCore) -> bool:
        """Run and measure one step of EngineCore's loop."""
        if self._loop is None:
            if self.steps is None:
                return bool(step(engine))
            self._loop = self.steps.wrap_loop(step)
        return self._loop(engine)

    def _describe_once(self, steps: StepProbe, scheduler: Scheduler) -> Action:
        """Return a hook for the end of the first step, when the pool has its final size: it describes the KV cache."""
        from kvtune.plugin.probe.describe import describe_cache

        def describe() -> None:
            steps.after_step = None
            try:
                facts = describe_cache(scheduler, self.workers_specs)
            except Exception as error:
                self._failed["cache description"] = f"{type(error).__name__}: {error}"
                return
            if steps.pool is not None:
                facts["tiers"] = list(steps.pool.queues)
            self.status.facts["cache"] = facts
            self.status.due = True

        return describe

    def _start_object_counts(self, collector: CollectorProbe, phase: Phase) -> Census | Sites | None:
        """Start what the level adds to `light`. The modules are imported here, so that `light` does not load them."""
        level, kind = self.level, collector_kind()
        if kind != "generational":
            self._failed[level] = (
                f"this Python's collector is {kind}: its young list is not what was allocated last"
            )
            return None
        try:
            if level == "types":
                from kvtune.plugin.probe.objects.census import Census

                counts: Census | Sites = Census(self.folder, phase)
            else:
                from kvtune.plugin.probe.objects.sites import Sites

                counts = Sites(self.folder, phase)
        except Exception as error:
            self._failed[level] = f"{type(error).__name__}: {error}"
            return None
        collector.listeners.append(counts)
        _thread.start_new_thread(self._keep_counts, (phase, counts))
        return counts

    def _keep_counts(self, phase: Phase, counts: Census | Sites) -> None:
        """Save the counts about once a second, and once more when the run is over. Runs in its own thread."""
        due = 0.0
        while phase.now != OVER:
            sleep(WATCH_EVERY_S)
            counts.expire()
            if phase.now != STARTING and monotonic() > due:
                with contextlib.suppress(RuntimeError):  # mutated during save; retried at the next tick
                    counts.save()
                due = monotonic() + SAVE_EVERY_S
        try:
            counts.save()
        except Exception as error:
            self._failed[self.level] = f"{type(error).__name__}: {error}"
        self.status.due = True

    def _keep_status(self, phase: Phase) -> None:
        """Write the status file, in its own thread, so that neither engine nor collections wait for the disk."""
        status, seen, written = self.status, phase.now, 0.0
        while not self._stopped:
            sleep(STATUS_POLL_S)
            now = phase.now
            if now == seen and not status.due and monotonic() - written < STATUS_EVERY_S:
                continue
            status.due = False
            if seen < CULPRITS and status.facts["role"] in ("engine_core", "worker"):
                with contextlib.suppress(RuntimeError):  # counters changed during the copy; retried next time
                    status.facts["core"] = state.state()  # only of the timed pass
            status.facts["disabled"] = self.disabled()
            if self.collector is not None and self._heap is not None:
                status.facts["triggers"] = self.collector.triggers()
                status.facts["heap"] = dict(self._heap.objects)
            status.write(count_frozen=now != seen)
            seen, written = now, monotonic()
