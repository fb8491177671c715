"""Differences in the text of prompts that break the shared prefix: groups, cost, gain of removing them."""

from __future__ import annotations

from kvtune.analysis.run import RunAnalysis
from kvtune.explain.sections import text_section
from kvtune.show.parts import Section

PLACE = 6


def section(analysis: RunAnalysis) -> Section | None:
    account = analysis.run.header.extra.texts
    return None if account is None else text_section(account)
