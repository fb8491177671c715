"""Admission by cached prefix: how many requests were overtaken. Drawn only for runs that have it."""

from __future__ import annotations

from dataclasses import asdict

from kvtune.analysis.run import RunAnalysis
from kvtune.report.charts import Section
from kvtune.report.console.admission import admission_rows


def section(analysis: RunAnalysis) -> Section | None:
    counts = analysis.admission
    if counts is None:
        return None
    lead = (
        "Of the requests that waited, the one with most of its prompt in the cache went first."
        if counts.in_force
        else ""
    )
    return Section(
        id="admission",
        title="Admission",
        lead=lead,
        template="admission.html",
        values={"facts": admission_rows(asdict(counts))},
    )
