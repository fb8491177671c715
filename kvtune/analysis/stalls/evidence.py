"""The evidence for a stall's cause: requests, a collection or a process. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtune.analysis.processes import process_keys
from kvtune.analysis.stalls.causes import COLUMN
from kvtune.analysis.stalls.delivery import WithoutCpu
from kvtune.analysis.stalls.engine import EngineTime, StepTimes
from kvtune.analysis.stalls.gaps import Gaps, Rows
from kvtune.run.types import Run

MOST_REQUESTS = 8


@dataclass(frozen=True, slots=True)
class Evidence:
    """A field that does not apply is empty, None or 0.

    `process`: the one that collected or had no CPU. `requests`: up to eight of the `prefilling` ones, those done first.
    `step_ms`: length of the longest step; `fitted_ms`: the usual time for its work.
    """

    process: str = ""
    stopped: bool = False
    requests: tuple[str, ...] = ()
    prefilling: int = 0
    prompt_tokens: int = 0
    generation: int | None = None
    pause_ms: float | None = None
    line: str = ""
    step_ms: float | None = None
    fitted_ms: float | None = None


def evidence(
    run: Run, steps: StepTimes | None, engine: EngineTime | None, gap: Gaps, cause: str, way: WithoutCpu
) -> Evidence:
    """Return the evidence for a gap (one row) with this cause. `way`: time without a CPU on the way to the client."""
    if steps is None or engine is None or not gap.known[0]:
        return Evidence()
    own = np.arange(int(gap.before[0]) + 1, int(gap.made[0]) + 1)
    if cause == "collection":
        return _collection(run, steps, gap, own)
    if cause == "prefill":
        return _prefill(run, steps, gap, own)
    step_s = steps.end_s[own] - steps.start_s[own]
    longest = int(step_s.argmax())
    step_ms, fitted_ms = float(step_s[longest]) * 1000.0, float(engine.fitted_s[own[longest]]) * 1000.0
    if cause != "off_cpu":
        return Evidence(step_ms=step_ms, fitted_ms=fitted_ms)
    parts_s = engine.parts[own, COLUMN["off_cpu"]]
    keys = process_keys(run)
    if float(parts_s.sum()) < way.seconds:
        return Evidence(process=keys[way.process] if way.process >= 0 else "front_end", stopped=way.stopped)
    step = own[int(parts_s.argmax())]
    process = int(engine.off_cpu.process[step])
    return Evidence(keys[process], bool(engine.off_cpu.stopped[step]), step_ms=step_ms, fitted_ms=fitted_ms)


def _collection(run: Run, steps: StepTimes, gap: Gaps, own: Rows) -> Evidence:
    """Find the longest collection that delayed the token: in the engine until it was made, then in the front end."""
    gc, keys = run.table("gc"), process_keys(run)
    front_end = np.isin(
        gc["process"], [i for i, p in enumerate(run.header.processes) if p.role == "front_end"]
    )
    made_s = steps.end_s[own[-1]]
    begin_s = np.where(front_end, made_s, steps.end_s[gap.before[0]])
    end_s = np.where(front_end, gap.end_s[0], made_s)
    pause_s = np.nan_to_num(gc["pause_us"]) / 1e6
    overlap_s = np.minimum(gc["t_s"] + pause_s, end_s) - np.maximum(gc["t_s"], begin_s)
    row = int(overlap_s.argmax())
    process, line = int(gc["process"][row]), int(gc["line"][row])
    counts = run.header.extra.ledger.get(str(process))
    lines = counts.lines if counts is not None else []
    return Evidence(
        process=keys[process],
        generation=int(gc["generation"][row]),
        pause_ms=float(pause_s[row]) * 1000.0,
        line=lines[line - 1] if 0 < line <= len(lines) else "",
    )


def _prefill(run: Run, steps: StepTimes, gap: Gaps, own: Rows) -> Evidence:
    """Name the requests that probably prefilled (which is not recorded): those sent and still without a token."""
    requests = run.table("requests")
    others = np.flatnonzero(np.isfinite(requests["sent_s"]))
    others = others[others != gap.request[0]]
    first = requests["first_token_s"][others]
    done_in = np.where(
        np.isfinite(first), np.searchsorted(steps.end_s, first, side="right") - 1, len(steps.end_s)
    )
    named: dict[int, None] = {}
    for step in own[steps.table["prefill_tokens"][own] > 0].tolist():
        decodes = steps.table["scheduled_tokens"][step] - steps.table["prefill_tokens"][step]
        many = int(max(1, steps.table["requests"][step] - decodes))
        here = np.flatnonzero((requests["sent_s"][others] < steps.end_s[step]) & (done_in >= step))
        here = here[np.lexsort((requests["sent_s"][others[here]], done_in[here]))][:many]
        named |= dict.fromkeys(others[here].tolist())
    return Evidence(
        requests=tuple(str(requests["id"][i]) for i in list(named)[:MOST_REQUESTS]),
        prefilling=len(named),
        prompt_tokens=int(steps.table["prefill_tokens"][own].sum()),
    )
