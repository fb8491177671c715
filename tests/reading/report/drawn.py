"""The made-up runs that pages are drawn of, each made once a process."""

from __future__ import annotations

from collections.abc import Callable

from kvtune.answers.tune.document import document as study_document
from kvtune.answers.tune.result import StudyView
from kvtune.data.run.types import Run
from kvtune.data.show.page import document_page
from kvtune.data.show.screen import document_lines
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.run import document
from tests.golden import synthetic

KINDS: dict[str, Callable[[], Run]] = {
    "rounds": synthetic.rounds_run,
    "open": synthetic.open_run,
    "partial": synthetic.partial_run,
    "empty": synthetic.empty_run,
    "hostile": synthetic.hostile_run,
    "sim": synthetic.sim_run,
    "bare": synthetic.bare_run,
    "evictions": synthetic.evicting_run,
}
made: dict[str, Run] = {}


def run_of(kind: str) -> Run:
    if kind not in made:
        made[kind] = KINDS[kind]()
    return made[kind]


def run_page(analysis: RunAnalysis) -> str:
    return document_page(document(analysis))


def study_page(study: StudyView) -> str:
    return document_page(study_document(study))


def words(html: str) -> str:
    """A page's text: each argument of a command is one element."""
    return html.replace('<span class="w">', "").replace("</span>", "").replace("<wbr>", "")


def summary_text(analysis: RunAnalysis, *, width: int = 100) -> str:
    """What a terminal shows with `--verbose`, as plain text."""
    return "\n".join(document_lines(document(analysis), width)) + "\n"
