"""A chart of hit rates: an infinite cache, the optimum, the best known policy and LRU, and this run."""

from __future__ import annotations

from kvtune.analysis.cache import match_unit
from kvtune.analysis.run import RunAnalysis
from kvtune.bounds.ladder import RUNGS, Bounds, bounds, node_size
from kvtune.errors import KvtuneError
from kvtune.layout.config import shape_of
from kvtune.run.limits import PATH_BLOCKS
from kvtune.run.types import Run
from kvtune.show.charts import SERIES, columns, spec_of
from kvtune.show.parts import Cell, Chart, grid
from kvtune.units import count, percent
from kvtune.workload.types import Workload

LARGEST = 20_000  # requests; with more, no bounds are computed, because a page would take too long


def ladder(analysis: RunAnalysis) -> Chart | None:
    """Draw the chart. Return None if the run is not complete or its workload has no bounds."""
    import altair as alt

    cache, limits = analysis.prefix_cache, _bounds(analysis.run, analysis.workload)
    if limits is None or cache.hit_rate is None or not limits.infinite:
        return None  # no bounds, or no token that any cache could hit
    pool = limits.curve[0]
    within = f", in a pool of {count(pool.pool_tokens)} tokens"
    rungs = (
        _rung("infinite", limits.infinite),
        _rung("optimum", pool.optimum, within),
        _rung("best_known", pool.best_known, within),
        _rung("lru", pool.lru, within),
        ("this run", "what the engine did", cache.hit_rate),
    )
    names = [name for name, _, _ in rungs]
    drawing = (
        alt.Chart(alt.NamedData(name="ladder"), height=26 * len(rungs))
        .mark_bar()
        .encode(
            y=alt.Y("rung:N", sort=None, axis=alt.Axis(title="cache", labelLimit=130)),
            x=alt.X("rate:Q", title="hit rate (%)", scale=alt.Scale(domain=[0, 100])),
            color=alt.condition("datum.rung == 'this run'", alt.value("var(--c-hit)"), alt.value(SERIES[5])),
            tooltip=[
                alt.Tooltip("rung:N", title=" "),
                alt.Tooltip("rate:Q", title="hit rate (%)", format=".1f"),
                alt.Tooltip("what:N", title=" "),
            ],
        )
    )
    data = columns(rung=names, rate=[100 * rate for _, _, rate in rungs], what=[what for _, what, _ in rungs])
    rows = [(name, Cell(percent(rate), rate), what) for name, what, rate in rungs]
    label = f"This run: {percent(cache.hit_rate)}; an infinite cache: {percent(limits.infinite)}."
    note = f"Bounds: {'; '.join(filter(None, (*limits.notes, limits.relaxation)))}."
    table = grid(("cache", "hit rate", "what it is"), rows, "Hit rates that this workload allows")
    return Chart(
        "ladder", "How far from what is possible", label, spec_of(drawing), table, {"ladder": data}, note
    )


def _rung(name: str, rate: float, within: str = "") -> tuple[str, str, float]:
    title, what = RUNGS[name]
    return title, what + within, rate


def _bounds(run: Run, workload: Workload | None) -> Bounds | None:
    h = run.header
    if workload is None or h.state != "complete" or not h.engine.num_blocks or not workload.requests:
        return None
    if len(workload.requests) > LARGEST:
        return None
    try:
        shape = shape_of(h.model_config, h.model) if h.model_config else None
    except KvtuneError:
        shape = None
    unit = match_unit(run)
    if (workload.prompt_tokens + workload.output_tokens) // node_size(workload, unit) > PATH_BLOCKS:
        return None
    try:
        return bounds(
            workload,
            [h.engine.num_blocks * max(h.engine.block_sizes) // unit],
            block_tokens=unit,
            shape=shape,
        )
    except KvtuneError:
        return None
