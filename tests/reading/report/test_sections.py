"""A page's sections are the modules of their folder: a new one needs one file."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from kvtune.data.run.types import CoreInfo, ProbeInfo
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report import sections
from kvtune.reading.report.sections import culprits
from tests.golden.synthetic import replace_header
from tests.reading.report.drawn import run_of, run_page, summary_text

NEW = '''
"""The longest prompt."""

from kvtune.data.show.parts import Cell, Section, grid

PLACE = 35


def section(analysis):
    longest = int(analysis.run.table("requests")["prompt_tokens"].max())
    table = grid(("prompt", "tokens"), [("the longest", Cell(str(longest), longest))], "Prompts")
    return Section("prompts", "Prompts", "How long they are.", tables=(table,))
'''


def test_a_new_section_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts_of_a_test.py").write_text(NEW)
    analysis = RunAnalysis(run_of("rounds"))
    with monkeypatch.context() as added:
        added.setattr(sections, "__path__", [*sections.__path__, str(tmp_path)])
        page, text = run_page(analysis), summary_text(analysis)
    sys.modules.pop(f"{sections.__name__}.prompts_of_a_test")
    assert '<section id="prompts"' in page and '<a href="#prompts">Prompts</a>' in page
    assert page.index('id="cache"') < page.index('id="prompts"') < page.index('id="timeline"')
    assert "the longest" in page and "the longest" in text
    assert '<section id="prompts"' not in run_page(analysis)


def test_every_section_has_its_own_place() -> None:
    places = [module.PLACE for module in sections.modules()]
    assert len(places) == len(set(places)) > 10


@pytest.mark.parametrize("core", ["kvtune", "stock"])
def test_a_census_without_a_collection_says_why_and_what_to_run(core: str) -> None:
    run = replace_header(
        run_of("rounds"), source="engine", probe=ProbeInfo(level="types"), core=CoreInfo(name=core)
    )
    none = {name: column[:0] for name, column in run.tables["gc"].items()}
    silent = dataclasses.replace(run, tables={**run.tables, "gc": none})
    drawn = culprits.section(RunAnalysis(silent))
    assert drawn is not None and "0 collections came" in drawn.lead and "-w seed-decode-short" in drawn.lead
    ((_, line),) = drawn.asked
    assert "--probe types" in line and "--core stock" in line
    assert ("kvtune's core" in drawn.lead) is (core == "kvtune")
    off = replace_header(silent, probe=ProbeInfo(level="light"))
    assert culprits.section(RunAnalysis(off)) is None
