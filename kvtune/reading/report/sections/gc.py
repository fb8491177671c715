"""The garbage collector: collections and pauses by process and generation, and their part of EngineCore's steps."""

from __future__ import annotations

import numpy as np

from kvtune.base.units import count, ms, percent
from kvtune.data.run.types import Run
from kvtune.data.show.charts import GENERATION_COLORS, stacked
from kvtune.data.show.parts import Chart, Grid, Section, cell, grid, grid_of
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.gc import Join
from kvtune.reading.analysis.processes import process_keys, process_title
from kvtune.reading.analysis.run import RunAnalysis

PLACE = 60
LIMITS = ("collector",)


def section(analysis: RunAnalysis) -> Section | None:
    run, collectors = analysis.run, analysis.collectors
    if not collectors or not (len(run.table("gc")["t_s"]) or run.header.probe.level != "off"):
        return None
    return Section(
        id="gc",
        title="Garbage collector",
        lead=_lead(analysis),
        tables=(_by_process(analysis), _steps(analysis.collections_in_steps)),
        facts=tuple(_facts(analysis)),
        draw=lambda: (_pauses(run),),
    )


def _by_process(analysis: RunAnalysis) -> Grid:
    rows = (
        {
            "process": process_title(key),
            **{f"gen {number}": cell(n, count) for number, n in enumerate(collector.collections)},
            "pauses": cell(collector.pause_total_ms, ms),
            Column("CPU time", rank=1): cell(collector.cpu_ms, ms),
            "longest": cell(collector.pause_max_ms, ms),
            Column("p99", rank=3): cell(collector.pause_p99_ms, ms),
            "of step time": cell(collector.share_of_step, lambda share: percent(share, digits=2)),
            Column("frozen", rank=2): cell(collector.frozen, count),
        }
        for key, collector in analysis.collectors.items()
    )
    return grid_of(rows, "Collections and pauses by process")


def _steps(joined: Join) -> Grid:
    rows = [
        (name, cell(spread.count, count), *(cell(v, ms) for v in (spread.p50, spread.p99, spread.max)))
        for name, spread in (("with a collection", joined.with_collection), ("without", joined.without))
        if spread.count
    ]
    heads = ("EngineCore's steps", "number", "median", "p99", "longest")
    return grid(heads, rows, "Steps with and without a collection")


def _lead(analysis: RunAnalysis) -> str:
    steps = analysis.paused_steps
    if steps is None:
        return "A pause stops its process; only EngineCore's hold up a step."
    return (
        f"A pause stops its process. {count(steps.paused)} of {count(steps.steps)} steps had a collection in "
        f"EngineCore: {ms(steps.pause_ms_mean)} each on average, {percent(steps.share)} of the time of those steps."
        f"{_hidden(analysis)}"
    )


def _hidden(analysis: RunAnalysis) -> str:
    """Say how much of EngineCore's pauses the device hid by computing at the same time; "" if it is not known."""
    if analysis.hidden_steps is None:
        return ""
    time = analysis.step_time
    return (
        f" Of {ms(1000 * time.gc_s)} of pauses, {ms(1000 * (time.gc_s - time.exposed_gc_s))} were hidden by the "
        "device and cost nothing."
    )


def _facts(analysis: RunAnalysis) -> list[tuple[str, str]]:
    """Return collections in and between steps, each process's heap, and pauses in which the thread had no CPU."""
    where, facts = analysis.collections_in_steps.placed, []
    if where.in_steps or where.between_steps:
        within = f"{count(where.in_steps)} in {count(where.steps)} steps, {count(where.between_steps)} between steps"
        facts.append(("EngineCore's collections", within))
    for key, collector in analysis.collectors.items():
        parts = []
        if collector.heap_start is not None and collector.heap_last is not None:
            parts.append(
                f"{count(collector.heap_start)} objects at the start, {count(collector.heap_last)} at the end"
            )
        if collector.survivors_per_step is not None:
            parts.append(f"{collector.survivors_per_step:,.3g} survivors of young collections per step")
        if collector.preempted:
            parts.append(
                f"{count(collector.preempted)} of the pauses ({ms(collector.preempted_ms)}) were the machine's, "
                "not the collector's: the thread had no CPU"
            )
        if parts:
            facts.append((process_title(key), "; ".join(parts)))
    return facts


def _pauses(run: Run) -> Chart | None:
    gc = run.table("gc")
    if not len(gc["t_s"]):
        return None
    keys, generation_of = process_keys(run), np.clip(gc["generation"], 0, 2)
    names, parts, rows = [], [], []
    for process in sorted(set(gc["process"].tolist())):
        for generation in range(3):
            counted = (gc["process"] == process) & (generation_of == generation)
            n, total = int(counted.sum()), float(np.nansum(gc["pause_us"][counted])) / 1000
            names.append(process_title(keys[process]))
            parts.append((f"generation {generation}", total, f"{ms(total)} in {count(n)} collections"))
            rows.append((names[-1], parts[-1][0], cell(n, count), cell(total, ms)))
    colors = {f"generation {g}": color for g, color in enumerate(GENERATION_COLORS)}
    spec, data = stacked(
        "pauses", colors, parts, "pauses, summed (ms)", rows=names, of_rows="process", format=",.4~g"
    )
    worst = max(range(len(parts)), key=lambda number: parts[number][1])
    label = f"Most of the pause time: {names[worst]}, {parts[worst][0]}, {parts[worst][2]}."
    title = "Pause time by process and generation"
    table = grid(("process", "generation", "collections", "pauses"), rows, title)
    return Chart("pauses", title, label, spec, table, {"pauses": data})
