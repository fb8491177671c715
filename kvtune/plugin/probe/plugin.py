"""Starts the instruments in a process of vLLM, which may ask for it more than once (`kvtune/plugin/entry_points.py`).

Starts this process's instruments (`instruments.py`) and wraps vLLM's scheduler and step loop for them. Nothing here
may raise into the engine: an instrument that cannot start is listed as disabled in the status file.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvtune.plugin.probe.instruments import Instruments
from kvtune.plugin.probe.kv_specs import Layers, watch_workers
from kvtune.plugin.probe.lifetime import die_with_parent
from kvtune.plugin.probe.status import role
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.types import EngineCore

PART = "probe.plugin"


def register() -> None:
    """Start the instruments if the environment asks for them. Idempotent, also across a fork."""
    level = os.environ.get("KVTUNE_PROBE", "off")
    folder = os.environ.get("KVTUNE_RUN_DIR", "")
    if folder and (role() != "front_end" or multiprocessing.parent_process() is not None):
        die_with_parent(signal.SIGKILL)
    if role() == "helper":
        return
    if level == "off" or not folder or current() is not None:
        return
    _start(Path(folder), level)
    os.register_at_fork(after_in_child=_after_fork)


def current() -> Instruments | None:
    """Return the instruments started in this process (not in its parent, before a fork); else None."""
    instruments: Instruments | None = STATE.instruments
    return instruments if instruments is not None and instruments.pid == os.getpid() else None


def _after_fork() -> None:
    """Start the forked child's own instruments: it must not use its parent's ring, and vLLM registers only once."""
    if current() is None:
        _start(Path(os.environ.get("KVTUNE_RUN_DIR", "")), os.environ.get("KVTUNE_PROBE", "off"))


def _start(folder: Path, level: str) -> None:
    if STATE.instruments is not None:
        STATE.instruments.stop()
    instruments = STATE.instruments = Instruments(folder, level)
    try:
        instruments.start()
        _wrap_engine()
    except Exception as error:
        instruments.give_up(error)
    instruments.report()


def _wrap_engine() -> None:
    """Wrap the scheduler's constructor and the engine's step; both look up this process's instruments when called."""
    if any(patch.part == PART for patch in STATE.patches.installed()):
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCoreProc

    def built(scheduler: Scheduler) -> None:
        # Else an EngineCore of 0.32 on a CPU forgets a hybrid's block: some hits are wrong, and none are a replay's.
        scheduler.cache_config.user_specified_block_size = True
        if (instruments := current()) is not None:
            instruments.watch_scheduler(scheduler)

    def wrap_step(step: Callable[[EngineCore], bool]) -> Callable[[EngineCore], bool]:
        def stepped(self: EngineCore) -> bool:
            instruments = current()
            return bool(step(self)) if instruments is None else instruments.run_step(step, self)

        return stepped

    def told(specs: Layers) -> None:
        if (instruments := current()) is not None:
            instruments.workers_specs = specs

    with suppress(Exception):  # without it the run has the scheduler's view of the specs
        watch_workers(PART, told)
    STATE.patches.after(PART, Scheduler, "__init__", built)
    STATE.patches.wrap(PART, EngineCoreProc, "_process_engine_step", wrap_step)
