"""How much longer than usual a token took, by cause: in the steps of EngineCore, and on its way to the client. Pure.

A step's time counts from the end of the previous step: between the two, EngineCore reads requests and sends tokens. A
delivery counts from the token's step to the client: when the front end took it, and what delayed that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.data.run.step_work import PREFILL_FEATURES, fit_step_time, step_work
from kvtune.data.run.types import Run, Table
from kvtune.reading.analysis.stalls.times import (
    Covered,
    Gaps,
    OffCpu,
    Rows,
    Seconds,
    covered,
    cpu_waits,
    off_cpu,
)

CAUSES = {
    "preemption": "the request was preempted and computed again",
    "collection": "a garbage collection",
    "off_cpu": "a process waited for a CPU",
    "prefill": "prefill of other requests in the same step",
    "batch": "more or longer requests in the step",
    "device": "the step took longer than its work",
    "engine_wait": "EngineCore took long between two steps",
    "front_end": "the front end took the tokens late",
    "client": "the client took its tokens late",
    "unknown": "not explained",
}
"""The causes. If two have equal parts, the first one counts."""

LEAST_SHARE = 0.0005
"""A cause with a smaller share of the time is not shown: it would read 0."""

COLUMN = {cause: column for column, cause in enumerate(CAUSES)}

LOST = ("off_cpu", "device", "engine_wait", "front_end", "client")
"""Causes during which no process works for a request. Collections and preemptions are separate limits (verdict.py)."""

ADVICE = {
    "preemption": "Let fewer requests run at once (--max-num-seqs), or give the engine more blocks.",
    "collection": "Run with kvtune's core, which collects less; if it runs already, see which objects: --probe types.",
    "off_cpu": "Give the engine's processes cores that nothing else uses (taskset, cpusets), and look who runs there.",
    "prefill": "Compute prompts in smaller chunks (--max-num-batched-tokens): steps get shorter, prompts take longer.",
    "batch": "Fewer requests at once (--max-num-seqs) make each step shorter.",
    "device": "Repeat the run: a step that takes longer again at the same place is the model's, not the machine's.",
    "engine_wait": "See what EngineCore does between steps: sample its stacks (--stacks).",
    "front_end": "See what the front end does: sample its stacks (--stacks), or give it a core.",
    "client": "The engine had the tokens: look at the client, or at how many share the front end's loop.",
    "unknown": "Record more: --probe light has every figure that this account uses.",
}


FEWEST_STEPS = 20
"""A fit needs this many steps. With fewer prefill steps, all their time above the decodes' counts as prefill."""

SPINS_SHARE = 0.8
SPINS_S = 1.0
"""EngineCore's thread spins while a worker computes, for up to a second: it then needs a CPU all the time."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The steps that made tokens, in order."""

    start_s: Seconds
    end_s: Seconds
    table: Table
    process: int


@dataclass(frozen=True, slots=True)
class EngineTime:
    """`parts`: seconds above `usual_s` by step and cause. `fitted_s`: the usual time for each step's work."""

    usual_s: float
    fitted_s: Seconds
    parts: NDArray[np.float64]
    off_cpu: OffCpu


def step_times(run: Run) -> StepTimes | None:
    """Return the steps. None if none were recorded, or if several engines ran, as a token does not name its engine."""
    steps = run.table("steps")
    if not len(steps["t_s"]) or len(np.unique(steps["process"])) > 1:
        return None
    order = np.argsort(steps["t_s"], kind="stable")
    table = {name: column[order] for name, column in steps.items()}
    start = table["t_s"].astype(np.float64)
    end = np.maximum.accumulate(start + np.nan_to_num(table["step_us"]) / 1e6)
    return StepTimes(start, end, table, int(steps["process"][0]))


def engine_time(run: Run, steps: StepTimes, usual: Rows, collecting: Covered, paused: Covered) -> EngineTime:
    """Split the time of each step above the usual by cause. `usual`: for each gap of a single step, that step.

    `collecting`: the collector's part of the `paused` time.
    """
    before_s = np.concatenate((steps.start_s[:1], steps.end_s[:-1]))
    whole_s = steps.end_s - before_s
    usual_s = _median(whole_s[usual])
    step_s, between_s = steps.end_s - steps.start_s, np.maximum(steps.start_s - before_s, 0.0)
    paused_in_s = paused.within(steps.start_s, steps.end_s)
    paused_between_s = paused.within(before_s, steps.start_s)
    clean_s = np.maximum(step_s - paused_in_s, 0.0)
    decode_s, fitted_s = _fitted(steps.table, clean_s)
    collected_s = collecting.within(before_s, steps.end_s)

    over_s = np.maximum(whole_s - usual_s, 0.0)
    parts = np.zeros((len(step_s), len(CAUSES)))
    parts[:, COLUMN["collection"]] = collected_s
    parts[:, COLUMN["off_cpu"]] = np.maximum(paused_in_s + paused_between_s - collected_s, 0.0)
    parts[:, COLUMN["prefill"]] = np.maximum(fitted_s - decode_s, 0.0)
    parts[:, COLUMN["batch"]] = np.maximum(decode_s - _median(decode_s[usual]), 0.0)
    parts[:, COLUMN["device"]] = np.maximum(clean_s - fitted_s, 0.0)
    waited_s = np.maximum(between_s - paused_between_s, 0.0)
    parts[:, COLUMN["engine_wait"]] = np.maximum(waited_s - _median(waited_s[usual]), 0.0)
    parts *= np.minimum(over_s / np.maximum(parts.sum(axis=1), 1e-12), 1.0)[:, None]
    return EngineTime(usual_s, fitted_s, parts, _without_cpu(run, steps, before_s, parts))


def _fitted(work: Table, clean_s: Seconds) -> tuple[Seconds, Seconds]:
    """Return the fitted seconds of each step: for its decodes alone, and for all of its work."""
    prefills = work["prefill_tokens"] > 0
    if len(clean_s) < FEWEST_STEPS:
        decodes = clean_s[~prefills] if (~prefills).any() else clean_s
        decode_s = np.full(len(clean_s), _median(decodes))
    else:
        features = step_work(work)
        weights = fit_step_time(features, clean_s * 1e6) / 1e6
        if prefills.sum() >= FEWEST_STEPS:
            fitted_s = features @ weights
        features[:, PREFILL_FEATURES] = 0.0
        decode_s = features @ weights
        if prefills.sum() >= FEWEST_STEPS:
            return decode_s, fitted_s
    return decode_s, np.where(prefills, np.maximum(clean_s, decode_s), decode_s)


def _without_cpu(run: Run, steps: StepTimes, before_s: Seconds, parts: NDArray[np.float64]) -> OffCpu:
    """Move the time of `device` and `engine_wait` that a wait for a CPU or a stop explains to `off_cpu`."""
    device, wait = COLUMN["device"], COLUMN["engine_wait"]
    unexplained_s = parts[:, device] + parts[:, wait]
    so_far = np.cumsum(unexplained_s)
    spans = Covered(
        np.column_stack((before_s, steps.end_s)).ravel(),
        np.column_stack((so_far - unexplained_s, so_far)).ravel(),
    )
    waits = cpu_waits(run, "engine_core", "worker")
    waited = off_cpu(waits, before_s, steps.end_s, spans, unexplained_s)
    moved_s = unexplained_s * waited.share
    lost_s = _lost_while_spinning(steps)
    moved_s = np.minimum(np.maximum(moved_s, lost_s), unexplained_s)
    process = np.where(waited.process < 0, steps.process, waited.process)
    left = 1.0 - moved_s / np.maximum(unexplained_s, 1e-12)
    parts[:, device] *= left
    parts[:, wait] *= left
    parts[:, COLUMN["off_cpu"]] += moved_s
    return OffCpu(waited.share, process, waited.stopped)


def _lost_while_spinning(steps: StepTimes) -> Seconds:
    """Return each step's time in which EngineCore's thread had no CPU while it spun; 0 if it does not spin."""
    step_s, cpu_s = steps.table["step_us"] / 1e6, steps.table["cpu_us"] / 1e6
    share = cpu_s / np.maximum(step_s, 1e-12)
    if _median(share) < SPINS_SHARE:
        return np.zeros(len(step_s))
    return np.where(step_s <= SPINS_S, np.maximum(step_s - cpu_s, 0.0), 0.0)


def collected(run: Run, processes: list[int], slow_s: float) -> tuple[Covered, Covered]:
    """Return the collector's time in these processes, and the time of all its pauses.

    Time of a pause without a CPU counts as the collector's only if the collection's CPU time alone would have made a
    token slow (`slow_s`).
    """
    gc = run.table("gc")
    own = np.isin(gc["process"], processes)
    start, pause, cpu = gc["t_s"][own], gc["pause_us"][own] / 1e6, gc["cpu_us"][own] / 1e6
    return covered(start, np.where(cpu >= slow_s, pause, np.minimum(cpu, pause))), covered(start, pause)


@dataclass(frozen=True, slots=True)
class Delivery:
    """`parts[gap, cause]`: seconds that a token took longer than usual from its step to the client."""

    parts: NDArray[np.float64]
    off_cpu: OffCpu

    def without_cpu(self, row: int) -> WithoutCpu:
        """Return one gap's time without a CPU."""
        return WithoutCpu(
            float(self.parts[row, COLUMN["off_cpu"]]),
            int(self.off_cpu.process[row]),
            bool(self.off_cpu.stopped[row]),
        )


@dataclass(frozen=True, slots=True)
class WithoutCpu:
    """Seconds in which a process on a token's way to the client had no CPU. `process`: its index; -1: not known."""

    seconds: float = 0.0
    process: int = -1
    stopped: bool = False


def delivery(run: Run, steps: StepTimes, gaps: Gaps, usual: Gaps, slow_s: float) -> Delivery:
    """Split the delivery of each gap's token by cause. The steps of all gaps must be known."""
    made_s, taken_s = _made_and_taken_s(run, steps, gaps)
    usual_made_s, usual_taken_s = _made_and_taken_s(run, steps, usual)
    way_s, usual_way_s = taken_s - made_s, _median(usual_taken_s - usual_made_s)
    rest_s, usual_rest_s = np.maximum(gaps.end_s - taken_s, 0.0), _median(usual.end_s - usual_taken_s)
    roles = [i for i, process in enumerate(run.header.processes) if process.role == "front_end"]
    collecting, paused = collected(run, roles, slow_s)
    paused_s = paused.within(made_s, gaps.end_s)

    parts = np.zeros((len(made_s), len(CAUSES)))
    parts[:, COLUMN["collection"]] = collecting.within(made_s, gaps.end_s)
    parts[:, COLUMN["off_cpu"]] = np.maximum(paused_s - parts[:, COLUMN["collection"]], 0.0)
    front_end, client = COLUMN["front_end"], COLUMN["client"]
    way_s = np.maximum(way_s - usual_way_s - paused.within(made_s, taken_s), 0.0)
    rest_s = np.maximum(rest_s - usual_rest_s - paused.within(taken_s, gaps.end_s), 0.0)
    late_s = way_s + rest_s
    # Tokens of one step are late together: time in which any of them was late counts once.
    late = covered(gaps.end_s - late_s, late_s)
    # A thread of EngineCore sends the tokens: none are sent while the process is stopped.
    senders = [own.only_stops() for own in cpu_waits(run, "engine_core")]
    waited = off_cpu([*cpu_waits(run, "front_end"), *senders], made_s, gaps.end_s, late, late_s)
    parts[:, front_end] = way_s * (1.0 - waited.share)
    parts[:, client] = rest_s * (1.0 - waited.share)
    parts[:, COLUMN["off_cpu"]] += late_s * waited.share
    return Delivery(parts, waited)


def _median(values: Seconds) -> float:
    return float(np.median(values)) if len(values) else 0.0


def _made_and_taken_s(run: Run, steps: StepTimes, gaps: Gaps) -> tuple[Seconds, Seconds]:
    """Return, for each gap, when its token was made, and when the front end next took tokens.

    If the latter was not recorded, the front end counts as taking the token when the client got it.
    """
    receipts = np.sort(run.table("receipts")["t_s"])
    made_s = np.clip(steps.end_s[gaps.made], gaps.begin_s, gaps.end_s)
    if not len(receipts):
        return made_s, gaps.end_s
    places = np.searchsorted(receipts, made_s, side="right")
    taken_s = np.where(places < len(receipts), receipts[np.minimum(places, len(receipts) - 1)], gaps.end_s)
    return made_s, np.minimum(taken_s, gaps.end_s)
