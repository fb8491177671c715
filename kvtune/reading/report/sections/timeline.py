"""The timeline: steps, collections, requests, hits, KV blocks (held, evicted) and RSS on one time axis.

A lane (`lanes.py`) is drawn if its table was recorded.
"""

from __future__ import annotations

import itertools

import numpy as np

from kvtune.base.units import ms
from kvtune.data.run.types import Run
from kvtune.data.show.parts import Grid, Section, grid_of
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.sections.lanes import LANES, drawn_lanes, lanes_chart

PLACE = 50
SPANS = 20


def section(analysis: RunAnalysis) -> Section | None:
    run = analysis.run
    if "looks" in run.tables:  # a server's time axis is in over_time.py
        return None
    end_s = _end(run)
    lanes = drawn_lanes(LANES, run, end_s)
    if not lanes:
        return None
    note = " ".join(dict.fromkeys([*(rows.note for _, rows in lanes if rows.note), *_quiet_pool(run)]))
    return Section(
        id="timeline",
        title="Timeline",
        lead="All processes share one clock: lanes line up in time.",
        draw=lambda: (
            lanes_chart("timeline", "What happened when", "", lanes, end_s, _table(run, end_s), note),
        ),
        page_only=True,
    )


def _end(run: Run) -> float:
    last = [run.header.wall_s]
    for name in ("steps", "gc", "memory"):
        times = run.table(name)["t_s"]
        if len(times):
            last.append(float(np.nanmax(times)))
    return max(last) or 1.0


def _quiet_pool(run: Run) -> list[str]:
    """Return a note on why the lane of evictions is missing; empty if it is drawn or no step was recorded."""
    if not len(run.table("steps")["t_s"]) or run.table("pool")["evicted"].any():
        return []
    if "pool" in run.tables:
        return ["No KV block was evicted: everything cached stayed in the pool."]
    return ["Evictions were not recorded in this run."]


def _table(run: Run, end_s: float) -> Grid:
    edges = np.linspace(0, end_s, SPANS + 1)
    steps, gc, requests, pool = (run.table(name) for name in ("steps", "gc", "requests", "pool"))
    evictions = "pool" in run.tables
    rows: list[dict[str, object]] = []
    for start, stop in itertools.pairwise(edges):
        step_us = steps["step_us"][(steps["t_s"] >= start) & (steps["t_s"] < stop)]
        pauses = gc["pause_us"][(gc["t_s"] >= start) & (gc["t_s"] < stop)]
        now = (pool["t_s"] >= start) & (pool["t_s"] < stop)
        sent = (requests["sent_s"] >= start) & (requests["sent_s"] < stop) & (requests["hit_tokens"] >= 0)
        rows.append(
            {
                "time": f"{start:.4g} to {stop:.4g} s",
                "steps": len(step_us),
                "mean step": ms(float(step_us.mean()) / 1000) if len(step_us) else "–",
                "longest step": ms(float(step_us.max()) / 1000) if len(step_us) else "–",
                "collections": len(pauses),
                "pauses": ms(float(pauses.sum()) / 1000) if len(pauses) else "–",
                "prompt tokens sent": int(requests["prompt_tokens"][sent].sum()),
                "hits among them": int(requests["hit_tokens"][sent].sum()),
                "blocks evicted": int(pool["evicted"][now].sum()) if evictions else "–",
            }
        )
    return grid_of(rows, f"The run in {SPANS} equal spans of time")
