"""The sections of the pages, in reading order. A section is a function of a run: what its template draws."""

from __future__ import annotations

from kvtune.report.charts import Section
from kvtune.run.types import Run
from kvtune.workload.types import Workload


def run_sections(run: Run, workload: Workload | None) -> list[Section]:
    from kvtune.report.sections import environment, timeline

    made = [timeline.section(run), environment.section(run)]
    return [section for section in made if section is not None]
