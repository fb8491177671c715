"""The prefix cache: prompt tokens that hit, that missed by cause, and hits per round."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.base.errors import KvtuneError
from kvtune.base.units import count, ms, percent
from kvtune.data.causes import CAUSES, UNCLASSIFIED, WINNABLE, cause_meaning, cause_title
from kvtune.data.layout.config import shape_of
from kvtune.data.run.limits import PATH_BLOCKS
from kvtune.data.run.types import Run
from kvtune.data.show.charts import SERIES, columns, spec_of, stacked
from kvtune.data.show.parts import Cell, Chart, Grid, Section, cell, grid, grid_of
from kvtune.data.show.terminal import Column
from kvtune.data.tally import Tally
from kvtune.reading.analysis.cache import Round, match_unit
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.verdict import winnable
from kvtune.reading.bounds.ladder import RUNGS, Bounds, bounds
from kvtune.reading.bounds.paths import node_size
from kvtune.requests.types import Workload

PLACE = 20
MEANING = Column("meaning", right=False, folds=True, rank=1, least=24)
LIMITS = ("cache", "block", "pool", "unknown")
HIT = "hit"
HIT_COLOUR = "var(--c-hit)"
HIT_MEANING = "read from the cache, not computed"


def section(analysis: RunAnalysis) -> Section | None:
    cache = analysis.prefix_cache
    if not cache.query_tokens:
        return None
    rounds = analysis.rounds
    where, by_round = _where(cache), _by_round(rounds)
    return Section(
        id="cache",
        title="Prefix cache",
        lead=_lead(cache),
        tables=(by_round, where),
        draw=lambda: (
            ladder(analysis),
            _rounds(rounds, by_round) if rounds else None,
        ),
    )


def _lead(cache: Tally) -> str:
    hit = f"{count(cache.hit_tokens)} of {count(cache.query_tokens)} prompt tokens were hits"
    lead = f"{hit} ({percent(cache.rate)})."
    if UNCLASSIFIED not in cache.misses:
        most = cache.hit_tokens + winnable(cache)
        lead += f" An infinite cache, empty at the start, would have had {percent(most, cache.query_tokens)}."
    return lead


def _parts(cache: Tally) -> dict[str, int]:
    """Return how many prompt tokens hit, then how many missed by each cause."""
    causes = sorted(cache.misses.items(), key=lambda item: _order(item[0]))
    return {HIT: cache.hit_tokens, **{cause: tokens for cause, tokens in causes if tokens}}


def _title(cause: str) -> str:
    return cause if cause == HIT else cause_title(cause)


def _where(cache: Tally) -> Grid:
    rows = (
        {
            Column("where", folds=True, least=16): _title(cause),
            "prompt tokens": cell(tokens, count),
            "share": Cell(percent(tokens, cache.query_tokens), tokens),
            MEANING: HIT_MEANING if cause == HIT else cause_meaning(cause),
        }
        for cause, tokens in _parts(cache).items()
    )
    return grid_of(rows, "Prompt tokens by where they went")


def bar(cache: Tally) -> Chart | None:
    """Draw the hits and the causes of misses in one bar; None without prompt tokens."""
    whole, parts = cache.query_tokens, _parts(cache)
    if not whole:
        return None
    colors = {_title(cause): _colour(cause, i) for i, cause in enumerate(parts)}
    drawn = [(_title(cause), n, f"{count(n)}, {percent(n, whole)}") for cause, n in parts.items()]
    spec, data = stacked("causes", colors, drawn, "prompt tokens")
    largest = max((c for c in parts if c != HIT), key=lambda c: parts[c], default=None)
    label = f"{percent(cache.hit_tokens, whole)} hits."
    if largest is not None:
        label += f" The largest part of the misses: {_title(largest)}, {percent(parts[largest], whole)}."
    return Chart("causes", "Where the prompt tokens went", label, spec, _where(cache), {"causes": data})


def _order(cause: str) -> int:
    """Return a cause's place in the table; one that this version does not know comes after those that can be won."""
    return list(CAUSES).index(cause) if cause in CAUSES else len(WINNABLE)


def _colour(cause: str, number: int) -> str:
    if cause == HIT:
        return HIT_COLOUR
    return (CAUSES[cause].colour if cause in CAUSES else "") or SERIES[(5 + number) % len(SERIES)]


def _by_round(rounds: Sequence[Round]) -> Grid:
    rows = (
        {
            "round": Cell(f"round {r.round + 1}", r.round),
            "prompt tokens": cell(r.query_tokens, count),
            "hits": cell(r.hit_tokens, count),
            "hit rate": cell(r.rate, percent),
            "mean first token": cell(r.ttft_ms_mean, ms),
        }
        for r in rounds
    )
    return grid_of(rows, "Hits by round")


def _rounds(rounds: Sequence[Round], table: Grid) -> Chart:
    names = [f"round {r.round + 1}" for r in rounds]
    hits = [(HIT, r.hit_tokens, count(r.hit_tokens)) for r in rounds]
    computed = [("computed", n, count(n)) for n in (r.missed for r in rounds)]
    colors = {HIT: HIT_COLOUR, "computed": CAUSES["cold"].colour}
    spec, data = stacked("rounds", colors, hits + computed, "prompt tokens", rows=names * 2, of_rows="round")
    label = "Hit rate by round: " + ", ".join(percent(r.hit_tokens, r.query_tokens) for r in rounds[:8])
    label += ", …" if len(rounds) > 8 else "."
    return Chart("rounds", "Hits in each round", label, spec, table, {"rounds": data})


LARGEST = 20_000  # requests; with more, no bounds are computed, because a page would take too long


def ladder(analysis: RunAnalysis) -> Chart | None:
    """Draw the chart. Return None if the run is not complete or its workload has no bounds."""
    import altair as alt

    cache, limits = analysis.prefix_cache, _bounds(analysis.run, analysis.workload)
    if limits is None or cache.rate is None or not limits.infinite:
        return None  # no bounds, or no token that any cache could hit
    pool = limits.curve[0]
    within = f", in a pool of {count(pool.pool_tokens)} tokens"
    rungs = (
        _rung("infinite", limits.infinite),
        _rung("optimum", pool.optimum, within),
        _rung("best_known", pool.best_known, within),
        _rung("lru", pool.lru, within),
        ("this run", "what the engine did", cache.rate),
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
    rows = [(name, cell(rate, percent), what) for name, what, rate in rungs]
    label = f"This run: {percent(cache.rate)}; an infinite cache: {percent(limits.infinite)}."
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
