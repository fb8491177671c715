"""The page of a run and the page of a comparison. Runs in the parent process."""

from __future__ import annotations

from kvtune.analysis.run import RunAnalysis
from kvtune.report.banners import banners, contrast_banners
from kvtune.report.contrast import Contrast
from kvtune.report.names import load_text, when
from kvtune.report.pages import comparison
from kvtune.report.sections import run_sections
from kvtune.run.signature import run_identity
from kvtune.run.types import Run
from kvtune.show.page import render


def run_page(analysis: RunAnalysis) -> str:
    """Return the page of one run, as HTML."""
    run, h = analysis.run, analysis.run.header
    return render(
        run_identity(h),
        title=f"{h.model} · {h.workload.name} · kvtune",
        eyebrow="kvtune prediction" if h.source == "sim" else "kvtune run",
        heading=h.model,
        subtitle=_subtitle(run),
        sections=run_sections(analysis),
        banners=banners(run),
    )


def compare_page(contrast: Contrast) -> str:
    """Return the page that compares runs with the first one, as HTML."""
    first = contrast.sides[0].run.header
    names = " against ".join((", ".join(side.name for side in contrast.sides[1:]), contrast.sides[0].name))
    return render(
        run_identity(first),
        title=f"{names} · {first.model} · kvtune",
        eyebrow="kvtune comparison",
        heading=names,
        subtitle=f"{first.model}, {load_text(first.workload)}",
        sections=comparison.sections(contrast),
        banners=contrast_banners(contrast),
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
