"""The sections of the pages, the costliest limit first. A section holds what its template draws."""

from __future__ import annotations

from kvtune.analysis.run import RunAnalysis
from kvtune.report.charts import Section

OF_LIMIT = {
    **dict.fromkeys(("cache", "block", "pool", "unknown"), "cache"),
    "collector": "gc",
    "host": "host",
    "stalls": "stalls",
}
"""The section of each limit that a verdict names."""


def run_sections(analysis: RunAnalysis) -> list[Section]:
    from kvtune.report.sections import (
        ablation,
        cache,
        culprits,
        environment,
        gc,
        host,
        latency,
        memory,
        offload,
        stacks,
        stalls,
        timeline,
        verdict,
    )

    run = analysis.run
    made = [
        verdict.section(analysis),
        latency.section(analysis),
        cache.section(analysis),
        stalls.section(analysis),
        offload.section(analysis),
        timeline.section(run),
        gc.section(analysis),
        culprits.section(analysis),
        host.section(analysis),
        ablation.section(run),
        stacks.section(run),
        memory.section(analysis),
        environment.section(run),
    ]
    limits = [OF_LIMIT[kind] for kind in analysis.verdict.limits]
    costs = {"verdict": -1, **{name: place for place, name in reversed(list(enumerate(limits)))}}
    present = [section for section in made if section is not None]
    return sorted(present, key=lambda section: costs.get(section.id, len(limits)))
