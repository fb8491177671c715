"""The launcher: starts the host process, follows its events and ends it. In the CLI's process; imports no vLLM.

If the engine dies, hangs or is interrupted, the measured part becomes a partial run. No process and no shared memory
is left behind; the work folder is removed when the run file has been written.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic_ns
from typing import Any

import msgspec

from kvtune.base import children
from kvtune.base.dialogue import Frames
from kvtune.base.errors import EXIT_INTERRUPTED, KvtuneError
from kvtune.base.files import appending, creating
from kvtune.lab.engine.device import DeviceSampler
from kvtune.lab.engine.faults import cause, hint_for, hub_fault, killed, killer, last_lines
from kvtune.lab.engine.messages import LOG_FILE, PLAN_FILE, Event, HostPlan
from kvtune.lab.engine.process import (
    ProcessSampler,
    born,
    kill_tree,
    shared_memory_files,
    shared_memory_in_use,
)
from kvtune.lab.setup.resolve import devices_used

FRONT_END = "the engine's front end"
GRACE_S = 15.0
"""Seconds for the host to save results and to shut the engine down before it is killed."""


@dataclass(slots=True)
class HostOutcome:
    """The times of a host's phases (monotonic ns) and how it ended. `error` is set if the run is not complete."""

    started_at: str
    launched_ns: int
    start_ns: int = 0  # start of the workload; 0: it never started
    end_ns: int = 0  # 0: the host did not say; the run then ends with its last step
    sampled_ns: int = 0  # when the sample at the end of the workload was done
    culprits_ns: int = 0  # start and (over_ns) end of the second pass, for allocation sites
    over_ns: int = 0
    notes: list[str] = field(default_factory=list)
    # Exit codes of the engine's processes that ended, by name.
    died: dict[str, int] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    error: KvtuneError | None = None
    sampler: ProcessSampler | None = None


def launch(
    plan: HostPlan,
    folder: Path,
    environment: Mapping[str, str],
    on_event: Callable[[Event], None],
    on_measuring: Callable[[int], None] = lambda pid: None,
) -> HostOutcome:
    """Run `plan` in `folder` and return how it ended. `on_measuring` gets the host's pid when the workload starts."""
    with creating(folder / PLAN_FILE) as part:
        part.write(msgspec.json.encode(plan))
    outcome = HostOutcome(datetime.now(UTC).isoformat(timespec="seconds"), monotonic_ns())
    before = shared_memory_files().keys()
    reader, writer = os.pipe()
    try:
        with appending(folder / LOG_FILE) as log:
            host = children.start(
                children.python("kvtune.lab.engine.host", str(folder), str(writer)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                variables={**environment, "KVTUNE_RUN_DIR": str(folder)},
                pass_fds=(writer,),
                start_new_session=True,  # Ctrl-C reaches only us; we signal the host
            )
    finally:
        os.close(writer)
    host_born = born(host.pid)
    outcome.sampler = ProcessSampler(host.pid, devices=DeviceSampler(most=devices_used(plan.vllm_args)))
    outcome.sampler.start()
    try:
        _follow(host, reader, outcome, on_event, on_measuring)
    except KeyboardInterrupt:
        outcome.error = KvtuneError("interrupted", exit_code=EXIT_INTERRUPTED)
        if outcome.start_ns and not outcome.end_ns:  # stack samplers must not see the shutdown
            on_event(Event(kind="phase", name="finishing"))
    finally:
        os.close(reader)
        kill_tree(host.pid, 0.5 if host.poll() is not None else GRACE_S, host_born)
        with contextlib.suppress(subprocess.TimeoutExpired):
            host.wait(timeout=5)
        outcome.sampler.stop()
        _sweep(outcome.sampler, before)
    if outcome.culprits_ns and not outcome.over_ns:
        outcome.over_ns = monotonic_ns()
    if outcome.error is not None and outcome.error.exit_code != EXIT_INTERRUPTED:
        outcome.error = _explain(outcome.error, outcome.died, folder, plan.setup.model)
    return outcome


def _follow(
    host: children.Child,
    reader: int,
    outcome: HostOutcome,
    on_event: Callable[[Event], None],
    on_measuring: Callable[[int], None],
) -> None:
    finished = False
    for event in _events(reader, host):
        if event.kind == "phase" and event.name == "measuring":
            outcome.start_ns = event.at_ns
            _sampled(outcome)
            on_measuring(host.pid)
        elif event.kind == "phase" and event.name == "finishing":
            outcome.end_ns = event.at_ns
            outcome.sampled_ns = _sampled(outcome)
        elif event.kind == "phase" and event.name == "culprits":
            outcome.culprits_ns = event.at_ns
        elif event.kind == "phase" and event.name == "over":
            outcome.over_ns = event.at_ns
            outcome.notes += [event.message] if event.message else []
        elif event.kind == "engine":
            outcome.engine = dict(event.facts)
        elif event.kind == "died":
            outcome.died = dict(event.codes)
        elif event.kind == "failed":
            message = f"{event.name}: {event.message}" if event.name else event.message
            outcome.error = KvtuneError(message, event.hint, event.exit_code)
        elif event.kind == "done":
            finished = True
        on_event(event)
    try:
        code = host.wait(timeout=GRACE_S)
        ending = (
            f"{FRONT_END} was killed by {killer(code)}"
            if code < 0
            else f"{FRONT_END} ended with exit code {code}"
        )
    except subprocess.TimeoutExpired:
        ending = f"{FRONT_END} did not end"
    if outcome.error is None and not finished:
        outcome.error = KvtuneError(ending)


def _sampled(outcome: HostOutcome) -> int:
    """Sample the processes at the start or end of the measurement. Return when that was done (monotonic ns)."""
    if outcome.sampler is not None:
        outcome.sampler.sample()
    return monotonic_ns()


def _events(reader: int, host: children.Child) -> Iterator[Event]:
    """Yield events until the pipe closes or the host has ended (a forked EngineCore can keep the pipe open longer)."""
    frames = Frames[Event](Event)
    while True:
        ready, _, _ = select.select([reader], [], [], 0.5)
        if not ready:
            if host.poll() is not None:
                return
            continue
        chunk = os.read(reader, 65536)
        if not chunk:
            return
        yield from frames.feed(chunk)


def _explain(error: KvtuneError, died: Mapping[str, int], folder: Path, model: str) -> KvtuneError:
    """Replace vLLM's `see root cause above` by the signal that killed a process, or the cause in the engine's log."""
    if error.hint:
        return error
    log_path = folder / LOG_FILE
    log = log_path.read_text(errors="replace") if log_path.exists() else ""
    by_signal, raised = killed(died, log), cause(log)
    if not by_signal and (fault := hub_fault(raised or error.message, model)):
        return KvtuneError(*fault, error.exit_code)
    message = by_signal or raised or error.message.splitlines()[0][:400]
    details = [f"engine's log: {line}" for line in last_lines(log)] if by_signal or not raised else []
    hint = hint_for(message, str(log_path))
    return KvtuneError(f"the engine failed: {message}", hint, error.exit_code, details)


def _sweep(sampler: ProcessSampler, before: Set[int]) -> None:
    """Unlink shared memory that this run's processes mapped and, because they were killed, did not unlink.

    Files that existed before the run stay: a model's weights may be mapped from there, too.
    """
    files = shared_memory_files()
    for inode in (sampler.shared_memory & files.keys()) - before - shared_memory_in_use():
        with contextlib.suppress(OSError):
            files[inode].unlink()
