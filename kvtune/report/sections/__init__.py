"""The sections of the pages, in reading order. A section is what its template draws of a run."""

from __future__ import annotations

from kvtune.analysis.run import RunAnalysis
from kvtune.report.charts import Section


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
        stalls.section(analysis),
        cache.section(analysis),
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
    return [section for section in made if section is not None]
