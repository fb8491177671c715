"""Differences in the text of prompts that break the shared prefix: groups, cost, gain of removing them."""

from __future__ import annotations

from kvtune.data.show.parts import Section
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.replayed import text_section

PLACE = 6


def section(analysis: RunAnalysis) -> Section | None:
    account = analysis.run.header.extra.texts
    return None if account is None else text_section(account)
