"""What a run says of itself: what limits it, what to try, then every section."""

from __future__ import annotations

from dataclasses import replace

from kvtune.data.run.signature import run_identity
from kvtune.data.show.parts import Document
from kvtune.reading.analysis.replayed import beside
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.banners import banners
from kvtune.reading.report.sections import run_sections


def document(analysis: RunAnalysis) -> Document:
    run, h = analysis.run, analysis.run.header
    warnings = banners(run)
    bad = [banner.title for banner in warnings if banner.css == "bad"]
    return Document(
        name="kvtune prediction" if h.source == "sim" else "kvtune run",
        subject=h.model,
        headline=" ".join((*bad, beside(run), analysis.verdict.limit)),
        sections=tuple(run_sections(analysis)),
        identity=run_identity(h),
        title=f"{h.model} · {h.workload.name} · kvtune",
        banners=tuple(warnings),
    )


def first_screen(document: Document) -> Document:
    """Return what fits a terminal: what limits the run, what to try, the main figures."""
    warnings = tuple(banner for banner in document.banners if banner.css != "info" or banner.lines)
    return replace(document, sections=document.sections[:1], banners=warnings)
