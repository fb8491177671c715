"""What helps: each setting that was replayed, with what it brings and takes, and how to measure and to serve it."""

from __future__ import annotations

from collections.abc import Iterator

from kvtune.data.run.extras import Replayed
from kvtune.data.show.parts import Section
from kvtune.reading.analysis.again import served_with, with_remedy
from kvtune.reading.analysis.replayed import helping, more_tries
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.replayed import helps

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
