"""`kvtune report RUN..|STUDY`: the page of a run, a comparison or a study, or the same on the console."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvtune.cli import options
from kvtune.cli.query import Query, When, argument, option
from kvtune.data.show.terminal import one_line

if TYPE_CHECKING:
    from kvtune.data.show.parts import Document


@dataclass(frozen=True, kw_only=True)
class ReportQuery(Query):
    FACTS = {"of": {"run": "one run file", "runs": "several run files", "study": "the journal of a study"}}
    runs: list[Path] = argument(MISSING, "RUNS...", parser=options.run_path)("""One run file (.kvrun, or
        `last`), several to compare, or the journal (.jsonl) of a study.""")
    output: Path | None = option(
        None,
        "-o,--output FILE.html",
        When("for a page that is written", "console md"),
        parser=options.new_page_path,
    )("""
        The page to write. Default: beside the first file.""")
    force: Annotated[options.Force, When("for a page that is written", "console md")] = False
    console: bool = option(False)("Print to the terminal and write no page.")
    md: Annotated[bool, options.MARKDOWN, When("another form, and so is --console", console=False)] = False
    objective: Annotated[options.Objective, When("what a study is ranked by", of="study")] = "hit-rate"
    trace: Annotated[options.RunTrace, When("for the causes of one run's misses", of="run")] = None
    open_: Annotated[options.Open, When("for a page that is written", "console md")] = False


def report(query: ReportQuery) -> None:
    """Draw a run, a comparison of runs, or a study of sweep or tune as one self-contained HTML file."""
    from kvtune.answers.tune.study import is_study

    if any(is_study(path) for path in query.runs):
        query.refuse(of="study")
        _study(query)
    elif len(query.runs) == 1:
        query.refuse(of="run")
        _run(query)
    else:
        query.refuse(of="runs")
        _runs(query)


def _run(query: ReportQuery) -> None:
    from kvtune.data.run.file import read_run
    from kvtune.reading.analysis.rebuild import with_workload
    from kvtune.reading.analysis.run import RunAnalysis
    from kvtune.reading.report.run import document

    (path,) = query.runs
    run = read_run(path)
    made = document(RunAnalysis(*with_workload(run, query.trace), str(path)))
    _show(query, made, path.with_suffix(".html"), private=run.private)


def _runs(query: ReportQuery) -> None:
    from kvtune.data.run.file import read_run
    from kvtune.reading.report.comparison import document
    from kvtune.reading.report.contrast import contrast

    loaded, first = [read_run(path) for path in query.runs], query.runs[0]
    made = document(contrast(loaded, [path.stem for path in query.runs]))
    beside = first.with_name(f"{first.stem}-compared.html")
    _show(query, made, beside, private=any(run.private for run in loaded))


def _study(query: ReportQuery) -> None:
    from kvtune.answers.tune.document import document
    from kvtune.answers.tune.objective import objective as objective_of
    from kvtune.answers.tune.study import read_study, recipe_of, saved_result, view
    from kvtune.base.errors import UsageError

    path, *others = query.runs
    if others:
        raise UsageError(
            "a study cannot be drawn together with other files", "give one study, or run files only"
        )
    objective, study = objective_of(query.objective), read_study(path)
    saved = saved_result(path, study)
    shown = view(study, objective, recipe_of(path, saved), saved)
    _show(query, document(shown), path.with_suffix(".html"))


def _show(query: ReportQuery, document: Document, beside: Path, *, private: bool = False) -> None:
    """Print the answer, or write its page. With --open an existing page is opened as it is, unless --force."""
    if query.md:
        from kvtune.data.show.markdown import markdown

        print(markdown(document), end="")
        return
    if query.console:
        from kvtune.data.show.screen import print_document

        print_document(document)
        return
    from kvtune.base.files import write_new
    from kvtune.data.show.page import document_page

    page, force = query.output or beside, query.force
    if not (query.open_ and page.is_file() and not force):
        write_new(document_page(document), page, force=force, private=private)
        print(one_line(str(page)))
    else:
        print(one_line(f"{page} (as it was: --force draws it anew)"))
    if query.open_:
        from kvtune.cli.views.answer import open_page

        open_page(page)
