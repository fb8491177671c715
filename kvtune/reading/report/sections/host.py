"""Host cost: EngineCore's step time, divided into the model and the Python around it."""

from __future__ import annotations

from kvtune.base.units import count, ms, percent
from kvtune.data.show.charts import SERIES, stacked
from kvtune.data.show.parts import Cell, Chart, Section, cell, grid
from kvtune.reading.analysis.host.ceiling import Ceiling
from kvtune.reading.analysis.host.overlap import Overlap
from kvtune.reading.analysis.processes import process_title
from kvtune.reading.analysis.run import RunAnalysis

PLACE = 80
LIMITS = ("host",)
COLORS = (SERIES[0], "var(--c-miss)", SERIES[1], SERIES[4])
PHASES = {"execute": "waiting for the model", "other": "rest of the step"}


def section(analysis: RunAnalysis) -> Section | None:
    time, cost = analysis.step_time, analysis.host_cost
    if not time.steps or not time.total_s:
        return None
    overlap, ceiling = analysis.overlap, analysis.ceiling
    executed = "dispatch the batch and wait for the model"
    if overlap is not None:
        executed = "wait for the device, hand batches over, read requests, send tokens"
    parts = (
        ("schedule", time.schedule_s, "choose requests, find hits, take blocks"),
        ("execute", time.execute_s, executed),
        ("update", time.update_s, "take sampled tokens, finish requests, free blocks"),
        ("other", time.other_s, "the rest of the step: queues, copying, sending"),
    )
    facts = [("steps", count(time.steps))]
    if time.busy_share is not None:
        facts.append(("EngineCore was in steps", f"{percent(time.busy_share, digits=0)} of the wall time"))
    if cost.step_ms.p50 is not None and cost.step_ms.p99 is not None:
        facts.append(("step", f"median {ms(cost.step_ms.p50)}, p99 {ms(cost.step_ms.p99)}"))
    if cost.schedule_us is not None and cost.update_us is not None and cost.per_request_step_us is not None:
        facts.append(("schedule, mean", ms(cost.schedule_us / 1000)))
        facts.append(("update, mean", ms(cost.update_us / 1000)))
        facts.append(("schedule and update, per request and step", ms(cost.per_request_step_us / 1000)))
    python = time.schedule_s + time.update_s
    lead = f"Schedule and update, the scheduler's own Python, are {percent(python, time.total_s)} of the step time."
    if overlap is not None:
        lead = f"{_overlapped(overlap)} {lead}"
        facts += _overlap_facts(overlap)
    if ceiling is not None:
        facts += _ceiling_facts(ceiling)
    elif analysis.no_ceiling:
        facts.append(("this host drives at most", f"not measured: {analysis.no_ceiling}"))
    facts += [
        (f"objects kept, {PHASES.get(phase, phase)}", f"{made:+,.1f} a step")
        for phase, made in (cost.objects or {}).items()
    ]
    return Section(
        id="host",
        title="Host cost",
        lead=lead,
        facts=tuple(facts),
        draw=lambda: (_parts(parts, time.total_s, time.steps),),
    )


def _overlapped(overlap: Overlap) -> str:
    """Return a sentence that says how long the device takes per step, and how long the host works meanwhile."""
    if overlap.device_ms is None or overlap.host_limits:
        what = f"The host is what limits: it works {ms(overlap.host_ms)} a step, and the device waits for it."
    else:
        host = f"the host {ms(overlap.host_ms)} of it, hidden."
        what = f"The {overlap.waited_for} needs {ms(overlap.device_ms)} a step, {host}"
    return what + overlap.seen


def _overlap_facts(overlap: Overlap) -> list[tuple[str, str]]:
    facts = [("EngineCore's own work, a step", ms(overlap.host_ms))]
    if overlap.device_ms is not None:
        facts.append(("the device, a step", ms(overlap.device_ms)))
    hidden, exposed = percent(overlap.waited_share, digits=0), percent(overlap.exposed_share, digits=0)
    return [
        *facts,
        ("EngineCore waited for the device in steps of", f"{hidden} of the time; its work is hidden there"),
        ("the device waited for the host", f"{exposed} of the time"),
    ]


def _ceiling_facts(ceiling: Ceiling) -> list[tuple[str, str]]:
    sets = process_title(ceiling.process)
    facts = [("this host drives at most", f"{count(ceiling.tokens_s)} output tokens/s; {sets} sets it")]
    facts += [
        (f"{process_title(name)}, a token", f"{value:.1f} µs of CPU")
        for name, value in ceiling.cpu_us_per_token.items()
        if value is not None
    ]
    return facts + [(f"of EngineCore's: {phase}", f"{us:.1f} µs") for phase, us in ceiling.phases_us.items()]


def _parts(parts: tuple[tuple[str, float, str], ...], total_s: float, steps: int) -> Chart:
    colors = dict(zip((name for name, _, _ in parts), COLORS, strict=True))
    means = [(name, 1000 * seconds / steps, percent(seconds, total_s), what) for name, seconds, what in parts]
    spec, data = stacked(
        "step-parts",
        colors,
        [(name, mean, f"{ms(mean)}, {share}") for name, mean, share, _ in means],
        "mean step (ms)",
        format=",.4~g",
    )
    rows = [(name, cell(mean, ms), Cell(share, mean), what) for name, mean, share, what in means]
    label = ", ".join(f"{name} {share}" for name, _, share, _ in means) + " of the step time."
    title = "The parts of a mean step"
    table = grid(("part", "per step", "share", "what it does"), rows, title)
    return Chart("step-parts", title, label, spec, table, {"step-parts": data})
