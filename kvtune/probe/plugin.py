"""Entry point that vLLM calls in each of its processes, possibly more than once. Inert unless KVTUNE_PROBE is set.

Installs the instruments of the asked level in this process. Nothing here may raise into the engine: an instrument
that cannot start is recorded as disabled in the status file.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from kvtune.probe.gc import CollectorProbe, collector_kind
from kvtune.probe.heap import Heap
from kvtune.probe.lifetime import die_with_parent
from kvtune.probe.phase import CULPRITS, MEASURING, OVER, STARTING, Phase
from kvtune.probe.ring import Ring
from kvtune.probe.status import Status, role
from kvtune.probe.steps import StepProbe

LEVELS = ("off", "light", "types", "sites", "full")
STATUS_EVERY_S = 1.0
RENEW_POLL_S = 0.1
WATCH_EVERY_S = 0.05
SAVE_EVERY_S = 1.0

_installed_pid = 0
_collector: CollectorProbe | None = None
_steps: StepProbe | None = None
_status: Status | None = None
_phase: Phase | None = None
_heap: Heap | None = None
_wrapped = False


def register() -> None:
    """Install the instruments when the environment asks for them; idempotent, also across a fork."""
    level = os.environ.get("KVTUNE_PROBE", "off")
    folder = os.environ.get("KVTUNE_RUN_DIR", "")
    if folder and role() != "front_end":
        die_with_parent(signal.SIGKILL)
    if role() == "helper":
        return
    if level == "off" or not folder or _installed_pid == os.getpid():
        return
    _install(Path(folder), level)
    os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    """A forked child must not write into its parent's ring; vLLM will not call register() again in it."""
    if _installed_pid != os.getpid():
        _install(Path(os.environ.get("KVTUNE_RUN_DIR", "")), os.environ.get("KVTUNE_PROBE", "off"))


def _install(folder: Path, level: str) -> None:
    global _installed_pid, _collector, _steps, _status, _phase, _heap
    _installed_pid = os.getpid()
    if _collector is not None:
        _collector.remove()
    _status = Status(folder)
    disabled: dict[str, str] = {}
    try:
        ring = Ring(folder / f"ring-{os.getpid()}.bin")
        _phase = Phase(folder)
        _collector = CollectorProbe(ring)
        _heap = Heap(_phase)
        _collector.listeners.append(_heap)
        _add_instruments(level, folder, _collector, _phase, disabled)
        _collector.install()
        _steps = StepProbe(ring, collector=_collector, digests=os.environ.get("KVTUNE_DIGESTS") == "1")
        if level == "sites" and role() == "engine_core":
            _sample_steps(_steps, _collector, _phase)
        _wrap_engine()
    except Exception as error:
        _collector = _steps = None
        disabled["light"] = f"{type(error).__name__}: {error}"
    _early.clear()
    _early.update(disabled)
    _status.write(level=level, disabled=disabled)
    if _phase is not None:
        _thread.start_new_thread(_renew, (_phase, _status))


_early: dict[str, str] = {}  # what could not be installed, and why


def _add_instruments(
    level: str, folder: Path, collector: CollectorProbe, phase: Phase, disabled: dict[str, str]
) -> None:
    """What a level has beyond `light`. Each is imported where it is asked for: light must stay light."""
    if level not in ("types", "sites", "full"):
        return
    kind = collector_kind()
    if kind != "generational" and level != "full":
        disabled[level] = f"this Python's collector is {kind}: its young list is not what was allocated last"
        return
    on_phase: dict[int, list[Any]] = {MEASURING: [], OVER: []}
    savers: list[Any] = []
    limits: list[Any] = []
    try:
        if level in ("types", "full") and kind == "generational":
            from kvtune.probe.objects.census import Census

            census = Census(folder, phase)
            collector.listeners.append(census)
            savers.append(census.save)
        if level == "sites":
            from kvtune.probe.objects.sites import Sites

            sites = Sites(folder, phase)
            collector.listeners.append(sites)
            savers.append(sites.save)
            limits.append(sites.expire)
        if level == "full":
            from kvtune.probe.objects.growth import Growth

            growth = Growth(folder)
            on_phase[MEASURING].append(growth.first)
            on_phase[OVER].append(growth.second)
    except Exception as error:
        disabled[level] = f"{type(error).__name__}: {error}"
        return
    on_phase[OVER] += savers
    _thread.start_new_thread(_watch, (level, phase, on_phase, savers, limits))


def _sample_steps(steps: StepProbe, collector: CollectorProbe, phase: Phase) -> None:
    from kvtune.probe.objects.sites import Sites
    from kvtune.probe.objects.step_sites import StepSites

    sites = next((each for each in collector.listeners if isinstance(each, Sites)), None)
    if sites is not None:
        sampler = StepSites(phase)
        sites.of_steps = sampler.facts
        steps.sampler = sampler


def _watch(
    level: str, phase: Phase, on_phase: dict[int, list[Any]], savers: list[Any], limits: list[Any]
) -> None:
    """A thread of these levels: acts when the run's phase changes, until it is over, and saves now and then."""
    seen, due = phase.now, 0.0
    while seen != OVER:
        sleep(WATCH_EVERY_S)
        now = phase.now
        for limit in limits:
            limit()
        if now == seen:
            if now != STARTING and monotonic() > due:
                for save in savers:
                    with contextlib.suppress(RuntimeError):  # counted into while it was read: the next time
                        save()
                due = monotonic() + SAVE_EVERY_S
            continue
        seen = now
        for act in on_phase.get(now, ()):
            try:
                act()
            except Exception as error:
                _early[level] = f"{type(error).__name__}: {error}"
    if _status is not None:
        _status.due = True


def _renew(phase: Phase, status: Status) -> None:
    """A thread that keeps the status true: files are never written where the engine's loop or a collection waits."""
    seen, written = phase.now, 0.0
    while status is _status:
        sleep(RENEW_POLL_S)
        now = phase.now
        if now == seen and not status.due and monotonic() - written < STATUS_EVERY_S:
            continue
        status.due = False
        if seen < CULPRITS and status.facts["role"] == "engine_core":
            with contextlib.suppress(RuntimeError):  # counters that are changing: the next time
                status.facts["core"] = _core_state()  # of the timed pass alone
        known: dict[str, Any] = {"disabled": _disabled()}
        if _collector is not None and _heap is not None:
            known |= {"triggers": _collector.triggers(), "heap": dict(_heap.objects)}
        status.write(count_frozen=now != seen, **known)
        seen, written = now, monotonic()


def _wrap_engine() -> None:
    """Wrap the scheduler when it is made and the engine's loop; the wrappers find this process's probe at call time."""
    global _wrapped
    if _wrapped:
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc

    make, step = Scheduler.__init__, EngineCoreProc._process_engine_step

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _scheduler_made(self)

    def stepped(self: Any) -> bool:
        return loop(self) if (loop := _loops.get(os.getpid())) is not None else bool(step(self))

    _loops: dict[int, Any] = {}

    def _scheduler_made(scheduler: Any) -> None:
        if _steps is None or _status is None:
            return
        try:
            _steps.wrap_scheduler(scheduler)
            _loops[os.getpid()] = _steps.wrap_loop(step)
            _steps.after_step = _describe_once(_steps, _status, scheduler)
        except Exception as error:
            _steps.failed = f"{type(error).__name__}: {error}"

    Scheduler.__init__ = made
    EngineCoreProc._process_engine_step = stepped
    _wrapped = True


def _describe_once(steps: StepProbe, status: Status, scheduler: Any) -> Any:
    """A function for the end of the first step, when the pool is what it will be."""
    from kvtune.probe.describe import describe_cache

    def describe() -> None:
        steps.after_step = None
        facts = describe_cache(scheduler)
        if steps.pool is not None:
            facts["tiers"] = list(steps.pool.tiers)
        status.facts["cache"] = facts
        status.due = True

    return describe


def _core_state() -> dict[str, Any]:
    try:
        from kvtune.core.state import state
    except ImportError:
        return {}
    return state()


def _disabled() -> dict[str, str]:
    found = {"gc": _collector.failed if _collector else "", "steps": _steps.failed if _steps else ""}
    if _steps is not None:
        found["step_sites"] = _steps.sampler_failed
        found["pool"] = _steps.pool_failed
    listeners = _collector.failed_listeners if _collector else {}
    return {name: why for name, why in {**found, **listeners, **_early}.items() if why}
