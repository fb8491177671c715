"""The page of a run. Runs in the parent process."""

from __future__ import annotations

from kvtune.analysis.run import RunAnalysis
from kvtune.report.banners import banners
from kvtune.report.names import load_text, when
from kvtune.report.sections import run_sections
from kvtune.run.signature import run_identity
from kvtune.run.types import Run
from kvtune.show.page import document_page
from kvtune.show.parts import Document


def run_page(analysis: RunAnalysis) -> str:
    """Return the page of one run, as HTML."""
    return document_page(document(analysis))


def document(analysis: RunAnalysis) -> Document:
    run, h = analysis.run, analysis.run.header
    return Document(
        name="kvtune prediction" if h.source == "sim" else "kvtune run",
        subject=h.model,
        headline=_subtitle(run),
        sections=tuple(run_sections(analysis)),
        identity=run_identity(h),
        title=f"{h.model} · {h.workload.name} · kvtune",
        banners=tuple(banners(run)),
    )


def _subtitle(run: Run) -> str:
    h = run.header
    device = h.engine.device_name or h.engine.device.replace("cpu", "CPU")
    return ", ".join(
        part
        for part in (
            load_text(h.workload),
            f"{h.core.name} core",
            f"vLLM {h.engine.vllm}",
            device,
            when(h.started_at),
        )
        if part
    )
