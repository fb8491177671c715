"""The host's work while the device computes: Run -> Overlap. Pure.

An engine that schedules ahead works on the next batch while the device computes one. This work costs no time as long as
EngineCore then still waits for the device; if EngineCore does not wait, the device waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.data.run.step_work import LEAST_WAIT_SHARE, waited_for
from kvtune.data.run.types import Run

MOSTLY_SHARE = 0.5

IN_PROCESS = ("uni", "UniProcExecutor", "TimedExecutor", "sim", "")
"""Executors whose worker runs in EngineCore's process, so that EngineCore does not wait for the worker's Python."""

Hidden = NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class Overlap:
    """The overlap of host and device in an engine that schedules ahead; times are means over batches.

    `device_ms`: the device's time for a batch, over those that EngineCore waited for; None if it waited for none.
    `host_ms`: EngineCore's own work. `waited_share`: share of the engine's time in batches that EngineCore waited for,
    during which its work is hidden. `exposed_share`: host work that was not hidden, as a share of the engine's time.
    `busy_share`: share of the time in which NVML saw a kernel on the GPUs; None if NVML does not count that. `workers`:
    the device belongs to worker processes, and EngineCore waits for their Python, too.
    """

    batches: int
    tokens: float
    device_ms: float | None
    host_ms: float
    waited_share: float
    exposed_share: float
    busy_share: float | None = None
    workers: bool = False

    @property
    def host_limits(self) -> bool:
        """Whether the engine waits for the host most of the time."""
        return self.exposed_share > MOSTLY_SHARE

    @property
    def waited_for(self) -> str:
        return "device or its workers" if self.workers else "device"

    @property
    def seen(self) -> str:
        """A sentence (after a space) on what NVML saw, and whether that contradicts the verdict; "" without NVML."""
        if self.busy_share is None:
            return ""
        saw = f" NVML saw the GPUs busy {100 * self.busy_share:.0f} % of the time"
        if self.host_limits and self.busy_share > 1 - LEAST_WAIT_SHARE:
            return f"{saw}, which contradicts that: launches that wait for the driver's full queue count as the host's."
        if not self.host_limits and self.busy_share < MOSTLY_SHARE:
            what = "the workers' Python" if self.workers else "something else than kernels"
            return f"{saw}, which contradicts that: EngineCore waited for {what}."
        return f"{saw}."


def overlap(run: Run, hidden: Hidden) -> Overlap | None:
    """Return how the host's work overlaps the device's; None if `hidden_steps` returned None."""
    if hidden is None:
        return None
    steps = run.table("steps")
    step_us, host_us = steps["step_us"], steps["step_us"] - steps["wait_us"]
    total_us = float(step_us.sum())
    return Overlap(
        batches=len(step_us),
        tokens=float((steps["scheduled_tokens"] - steps["prefill_tokens"]).mean()),
        device_ms=float(steps["device_us"][hidden].mean()) / 1000.0 if hidden.any() else None,
        host_ms=float(host_us.mean()) / 1000.0,
        waited_share=float(step_us[hidden].sum()) / total_us,
        exposed_share=float(host_us[~hidden].sum()) / total_us,
        busy_share=_busy_share(run),
        workers=run.header.engine.executor not in IN_PROCESS,
    )


def _busy_share(run: Run) -> float | None:
    busy = run.table("devices")["busy_percent"]
    return float(busy.mean()) / 100.0 if busy.any() else None


def hidden_steps(run: Run) -> Hidden:
    """Return, for each step, whether EngineCore waited for the device: if so, the device hid the host's work.

    None if the engine does not schedule ahead, or its waits were not recorded.
    """
    steps = run.table("steps")
    wait_us = steps.get("wait_us")
    if not run.header.engine.async_scheduling or wait_us is None or not len(wait_us):
        return None
    if not np.isfinite(wait_us).all() or not steps["step_us"].any():
        return None
    return waited_for(steps)
