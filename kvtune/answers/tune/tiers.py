"""What host memory of each size brings: a table, a chart and a sentence of a study's trials."""

from __future__ import annotations

from kvtune.answers.tune.result import StudyView
from kvtune.base.units import count, percent
from kvtune.data.knobs import TIER_SIZE
from kvtune.data.show.charts import columns, spec_of
from kvtune.data.show.parts import Chart, Section, grid


def tier_section(study: StudyView) -> Section | None:
    """Return the section of a study whose trials differ in the size of host memory alone."""
    by_size: dict[float, tuple[float, int, int]] = {}
    wanted = study.drawn_on, "complete", {TIER_SIZE}
    for trial in study.result.trials:
        if (trial.on, trial.state, set(trial.settings)) != wanted:
            continue
        cache, tier = trial.summary["prefix_cache"], trial.summary.get("offload") or {}
        asked, hits = cache["query_tokens"], cache["hit_tokens"]
        size = float(trial.settings[TIER_SIZE] or 0)
        by_size[size] = (hits / asked if asked else 0.0, tier.get("tier_hit_tokens", 0), asked - hits)
    sizes = sorted(by_size)
    if len(sizes) < 2:
        return None
    import altair as alt

    least, most = sizes[0], sizes[-1]
    saved = {size: by_size[least][2] - by_size[size][2] for size in sizes}
    knee = next((size for size in sizes if 3 * saved[size] >= 2 * saved[most]), most)
    lead = f"{most:g} GiB bring nothing that {least:g} GiB do not."
    if saved[most] > 0:
        lead = f"{knee:g} GiB bring {percent(saved[knee] / saved[most])} of what {most:g} GiB would: "
        lead += f"{count(saved[knee])} prompt tokens less to compute than with {least:g} GiB."
    heads = ("GiB", "hits", "loaded", "computed", "less to compute")
    rows = [(f"{s:g}", percent(by_size[s][0]), *map(count, (*by_size[s][1:], saved[s]))) for s in sizes]
    table = grid(heads, rows, "Prompt tokens by the size of host memory")
    data = columns(gib=sizes, hits=[100 * by_size[size][0] for size in sizes])
    drawing = alt.Chart(alt.NamedData(name="tiers"), height=220).mark_line(point=True, color="var(--c1)")
    drawing = drawing.encode(x=alt.X("gib:Q", title="GiB"), y=alt.Y("hits:Q", title="hit rate, %"))
    chart = Chart("tiers", "Hits by size", lead, spec_of(drawing), table, {"tiers": data})
    return Section("tiers", "Host memory by size", lead, tables=(table,), draw=lambda: [chart])
