"""What is said of a run about who overtook whom: as data, on the console, on the page."""

from __future__ import annotations

from typing import Any

from kvtune.analysis.run import RunAnalysis
from kvtune.analysis.summary import summary
from kvtune.report.console.summary import summary_text
from kvtune.report.pages.run import run_page
from kvtune.run.types import CoreInfo, Run
from tests.golden.synthetic import kvtune_run, replace_header

COUNTERS = {
    "admission_admitted": 4000,
    "admission_ahead": 410,
    "admission_overtaken": 3531,
    "admission_by_age": 7,
    "admission_longest_wait_us": 111_159_020,
}


def run_with(**parts: bool) -> Run:
    settings: dict[str, Any] = {"admission": "longest_prefix", "admission_age_s": 300.0}
    core = CoreInfo(name="kvtune", active=True, settings=settings, counters=COUNTERS, parts=parts)
    return replace_header(kvtune_run(), core=core)


def test_the_overtaken_are_counted_in_json() -> None:
    assert summary(RunAnalysis(run_with(admission=True)))["admission"] == {
        "in_force": True,
        "age_s": 300.0,
        "admitted": 4000,
        "ahead": 410,
        "overtaken": 3531,
        "by_age": 7,
        "longest_wait_s": 111.15902,
    }


def test_console_and_page_show_them() -> None:
    run = run_with(admission=True)
    for text in (summary_text(summary(RunAnalysis(run))), run_page(RunAnalysis(run))):
        assert "410 of 4,000 requests" in text and "3,531 (88.3 %)" in text
        assert "111 s" in text and "7 admissions (admission_age_s 300)" in text


def test_a_queue_that_stood_aside_is_told_from_one_in_which_nobody_was_overtaken() -> None:
    run = run_with(admission=False)
    assert summary(RunAnalysis(run))["admission"]["in_force"] is False
    for text in (summary_text(summary(RunAnalysis(run))), run_page(RunAnalysis(run))):
        assert "longest_prefix was not in force" in text and "3,531" not in text


def test_nothing_is_said_where_it_was_not_asked_for() -> None:
    run = run_with(steady=True)
    assert summary(RunAnalysis(run))["admission"] is None
    assert "longest wait" not in summary_text(summary(RunAnalysis(run)))
    assert 'id="admission"' not in run_page(RunAnalysis(run))
