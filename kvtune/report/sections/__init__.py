"""The sections of the pages, in reading order. A section is a function of a run: what its template draws."""

from __future__ import annotations

from kvtune.report.charts import Section
from kvtune.run.types import Run
from kvtune.workload.types import Workload


def run_sections(run: Run, workload: Workload | None) -> list[Section]:
    from kvtune.report.sections import (
        ablation,
        admission,
        cache,
        culprits,
        environment,
        gc,
        host,
        latency,
        memory,
        stacks,
        timeline,
        verdict,
    )

    made = [
        verdict.section(run, workload),
        latency.section(run),
        cache.section(run, workload),
        admission.section(run),
        timeline.section(run),
        gc.section(run),
        culprits.section(run),
        host.section(run),
        ablation.section(run),
        stacks.section(run),
        memory.section(run),
        environment.section(run),
    ]
    return [section for section in made if section is not None]
