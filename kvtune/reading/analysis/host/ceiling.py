"""The most tokens a second that this host can drive, and which process limits it: Run -> Ceiling. Pure.

A process that needs 100 µs of CPU time for an output token makes at most 10,000 tokens a second: vLLM's front end and
EngineCore each run their Python in one thread at a time, so on one core. A run on a simulated device measures it best.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtune.data.run.types import Run
from kvtune.reading.analysis.host.overlap import Overlap
from kvtune.reading.analysis.processes import process_keys

PROCESSES = ("front_end", "engine_core")

FEWEST_TOKENS = 1000
"""CPU time per token is too inexact with fewer tokens than this."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """`tokens_s`: the ceiling if each process has its own core. `process`: the process that limits it.

    `cpu_us_per_token`: by process, None if not known. `phases_us`: EngineCore's, by phase; they add up to that.
    """

    tokens_s: float
    process: str
    cpu_us_per_token: dict[str, float | None]
    phases_us: dict[str, float] = field(default_factory=dict)


def ceiling(run: Run, overlap: Overlap | None) -> Ceiling | None:
    """Return the ceiling. None for simulated runs, without an `overlap`, or if a process has too few samples."""
    if run.header.source == "sim" or overlap is None:
        return None
    cpu_us = _cpu_us(run, overlap)
    measured = {name: value for name, value in cpu_us.items() if value}
    if len(measured) < len(PROCESSES):
        return None
    process = max(measured, key=lambda name: measured[name])
    return Ceiling(1e6 / measured[process], process, cpu_us, _phases(run, measured["engine_core"]))


def unmeasured(run: Run, overlap: Overlap | None) -> str:
    """Return the reason why a run has no ceiling although runs of its kind can have one; else ""."""
    if run.header.source == "sim" or overlap is None or not run.header.processes:
        return ""
    cpu_us = _cpu_us(run, overlap)
    missing = [name for name in PROCESSES if not cpu_us[name]]
    if not missing:
        return ""
    which = " and ".join(
        {"front_end": "the front end", "engine_core": "EngineCore"}[name] for name in missing
    )
    return f"{which} had too few samples while {FEWEST_TOKENS:,} tokens came: the run is short, or the host was busy"


def _cpu_us(run: Run, overlap: Overlap) -> dict[str, float | None]:
    """Return the CPU time per token by process; None if it is not known."""
    cpu_us = {name: _of_the_only(run, name) for name in PROCESSES}
    if run.header.source != "host":
        # EngineCore's CPU time also includes the model's Python code and busy-waiting, so its work is timed instead.
        cpu_us["engine_core"] = 1000.0 * overlap.host_ms / overlap.tokens if overlap.tokens else None
    return cpu_us


def _of_the_only(run: Run, key: str) -> float | None:
    """Return the CPU time per token of the process if it is the only one of its role, else None."""
    keys = process_keys(run)
    return _cpu_us_per_token(run, keys.index(key)) if key in keys else None


def _cpu_us_per_token(run: Run, process: int) -> float | None:
    """Return a process's CPU time between its first and last sample, over the tokens that came meanwhile."""
    samples, tokens = run.table("memory"), run.table("tokens")
    rows = samples["process"] == process
    if rows.sum() < 2:
        return None
    t_s, cpu_s = samples["t_s"][rows], samples["cpu_s"][rows]
    first, last = int(np.argmin(t_s)), int(np.argmax(t_s))
    made = float(tokens["count"][(tokens["t_s"] > t_s[first]) & (tokens["t_s"] <= t_s[last])].sum())
    return 1e6 * float(cpu_s[last] - cpu_s[first]) / made if made >= FEWEST_TOKENS else None


def _phases(run: Run, engine_core_us: float) -> dict[str, float]:
    """Split EngineCore's CPU time per token into phases in proportion to their wall time: only the sum is measured."""
    steps = run.table("steps")
    tokens = float(run.table("tokens")["count"].sum())
    if not tokens:
        return {}
    schedule, update = float(steps["schedule_us"].sum()), float(steps["update_us"].sum())
    rest = max(float((steps["step_us"] - steps["wait_us"]).sum()) - schedule - update, 0.0)
    in_steps_us = min(float(steps["cpu_us"].sum()) / tokens, engine_core_us)
    if run.header.source != "host":
        in_steps_us = engine_core_us
    share = in_steps_us / max(schedule + update + rest, 1e-9)
    phases = {"schedule": schedule * share, "update": update * share, "rest of the step": rest * share}
    between = engine_core_us - in_steps_us
    return {**phases, "reading requests and sending tokens": between} if between > 0 else phases
