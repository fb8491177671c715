"""The console's summary: every part, plain in a pipe, coloured on a terminal unless NO_COLOR says no."""

from __future__ import annotations

import io

import pytest

from kvtune.data.run.extras import Remedy, Replayed
from kvtune.data.run.types import CoreInfo, Validity
from kvtune.data.show.screen import document_lines, document_view
from kvtune.reading.analysis.rebuild import workload_of
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.run import document, first_screen
from tests.golden.synthetic import empty_run, partial_run, replace_header, rounds_run
from tests.reading.report.drawn import summary_text


@pytest.fixture(scope="module")
def analysis() -> RunAnalysis:
    run = rounds_run()
    return RunAnalysis(run, workload_of(run))


def test_the_summary_has_every_part(analysis: RunAnalysis) -> None:
    text = summary_text(analysis)
    for part in (
        "Latency",
        "Hits by round",
        "Prefix cache",
        "Garbage collector",
        "Host cost",
        "Memory",
        "kvtune explain",
    ):
        assert part in text, part
    assert "45 requests" in text
    assert "round 3" in text and "98.4 %" in text
    assert "EngineCore" in text and "front end" in text


def test_the_first_screen_fits_a_terminal_and_has_verdict_figures_and_what_helps() -> None:
    run = rounds_run()
    remedies = [
        Remedy(change=f"setting {n}", cost="memory", core="kvtune", core_settings={"slack": n}, gain_tokens=n)
        for n in (70_000, 60_000, 50_000, 40_000, 1)
    ]
    told = Replayed(query_tokens=182_880, hit_tokens=61_440, other=remedies[-1], remedies=remedies[:-1])
    known = RunAnalysis(run.with_extra(replayed=told), workload_of(run))
    lines = document_lines(first_screen(document(known)), 80)
    assert sum(1 + (len(line) - 1) // 80 for line in lines if line) + lines.count("") <= 22
    text = " ".join(lines)
    assert text.startswith("Measured: stock vLLM, 33.6 % of tokens hit. Replayed: kvtune's core, 0.0 %.")
    for figure in ("Output ", "First token ", "Between tokens ", "Prefix cache ", "Collector "):
        assert figure in text
    assert "setting 70000 brings +38.3 points of hits, for memory." in text
    assert "+32.8 points of hits: setting 60000" in text and "+27.3 points of hits: setting 50000" in text
    assert "setting 40000" not in text, "the page has the rest"
    assert "--set core.slack=70000" in text


@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_no_color_is_honoured(
    analysis: RunAnalysis, no_color: str, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console, Group

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", no_color)
    out = io.StringIO()
    sample = RunAnalysis(partial_run())
    Console(file=out, force_terminal=True, width=120).print(Group(*document_view(document(sample), 120)))
    assert ("\x1b[33m" in out.getvalue()) is coloured


def test_a_line_fits_its_width(analysis: RunAnalysis) -> None:
    for width in (60, 80, 120):
        lines = summary_text(analysis, width=width).splitlines()
        commands = [line for line in lines if line.startswith("  kvtune ")]
        assert max(len(line) for line in lines if line not in commands) <= width
        assert f"  {analysis.verdict.command}" in commands, "whole, to be copied"


def test_a_failed_run_says_why_and_what_next() -> None:
    text = summary_text(RunAnalysis(empty_run()))
    assert "! This run failed. The engine did not start: CUDA out of memory" in text
    assert "kvtune doctor" in text
    assert "nan" not in text.lower().split()


def test_distorted_times_and_a_refused_core_are_named() -> None:
    run = replace_header(
        rounds_run(),
        valid=Validity(timings=False, why="the census stops the process"),
        core=CoreInfo(name="kvtune", active=False, why="vLLM 0.33 is not known"),
    )
    text = summary_text(RunAnalysis(run))
    assert "! Do not trust the times. The census stops the process." in text
    assert "! kvtune's core was not active: this is stock vLLM. vLLM 0.33 is not known." in text
