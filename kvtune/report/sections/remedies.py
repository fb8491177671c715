"""What helps: each setting that was replayed, with what it brings and takes, and how to measure and to serve it."""

from __future__ import annotations

from collections.abc import Iterator

from kvtune.analysis.again import served_with, with_remedy
from kvtune.analysis.replayed import helping, more_tries
from kvtune.analysis.run import RunAnalysis
from kvtune.explain.sections import helps
from kvtune.run.extras import Replayed
from kvtune.show.parts import Section

PLACE = 1


def section(analysis: RunAnalysis) -> Section | None:
    run, replayed = analysis.run, analysis.run.header.extra.replayed
    if replayed is None:
        return None
    table = helps(
        replayed, run.header.extra.texts, lambda remedy: (with_remedy(run, remedy), served_with(run, remedy))
    )
    return Section("remedies", "What helps", tables=(table,), notes=tuple(_without_effect(replayed)))


def _without_effect(replayed: Replayed) -> Iterator[str]:
    best = helping(replayed)
    others = [remedy.change for remedy in replayed.remedies if remedy not in best and not remedy.error]
    if others:
        yield f"Replayed too, and under a point: {'; '.join(others)}."
    if more := more_tries(replayed):
        yield f"{more}."
