"""Trials for a terminal: a live table on stderr that fills as they end, and the table of results on stdout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from kvtune.analysis.study import StudyResult, Trial
from kvtune.cli.notices import always
from kvtune.errors import EXIT_INTERRUPTED
from kvtune.tune.objective import OBJECTIVES, Objective
from kvtune.tune.space.grid import shown
from kvtune.tune.trials.journal import StudyJournal

LIVE_ROWS = 12
RESULT_ROWS = 40
PIPE_WIDTH = 140


class TrialsView:
    """Call it with each trial. Without a terminal each trial is a line."""

    def __init__(self, total: int, by: Objective) -> None:
        self._total, self._by = total, by
        self._trials: list[Trial] = []
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, transient=True, auto_refresh=False)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
            self.note("starting")
        else:
            print(f"{self._total} trials", file=sys.stderr, flush=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def __call__(self, trial: Trial) -> None:
        self._trials.append(trial)
        if self._console.is_terminal:
            self.note()
        else:
            name = f"{trial.role} " if trial.role == "baseline" else ""
            outcome = trial.why if trial.state == "failed" else _figures(trial)
            line = f"{len(self._trials)}/{self._total} {trial.on} {name}{shown(trial.settings)}: {outcome}"
            print(line, file=sys.stderr, flush=True)

    def phase(self, text: str) -> None:
        """A new stage begins."""
        if self._console.is_terminal:
            self.note(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def note(self, text: str = "") -> None:
        """Redraw the table; `text` stands in its title."""
        if not self._console.is_terminal:
            return
        title = f"{len(self._trials)}/{self._total} trials {text}".rstrip()
        rows = sorted(self._trials, key=lambda t: -(self._by.score(t.summary) or float("-inf")))
        self._live.update(table(rows[:LIVE_ROWS], title), refresh=True)


def table(trials: Sequence[Trial], title: str = "") -> Table:
    """One row a trial; knobs that any of them sets are columns."""
    knobs = list(dict.fromkeys(name for t in trials for name in t.settings))
    made = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for head in ("trial", "on", *knobs):
        made.add_column(head, overflow="fold")
    for head in ("hit rate", "ttft", "tok/s"):
        made.add_column(head, justify="right", no_wrap=True)
    made.add_column("state", overflow="fold")
    for t in trials:
        name = "stock" if t.core == "stock" else str(t.number)
        values = [_text(t.settings.get(k)) for k in knobs]
        made.add_row(name, t.on, *values, *_cells(t), t.why if t.state != "complete" else "complete")
    return made


def print_results(result: StudyResult, trials: Sequence[Trial], by: Objective) -> None:
    """The results table, best first, and the verdict."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    order = sorted(trials, key=lambda t: -(s if (s := by.score(t.summary)) is not None else float("inf")))
    order.sort(key=lambda t: by.score(t.summary) is None)
    console.print(table(order[:RESULT_ROWS]))
    if len(order) > RESULT_ROWS:
        console.print(f"{len(order) - RESULT_ROWS} more trials: --json lists all")
    console.print(result.verdict.text)
    for note in result.notes:
        console.print(note, markup=False)


def finish(
    result: StudyResult,
    trials: Sequence[Trial],
    journal: Path,
    by: Objective,
    *,
    as_json: bool,
    opened: bool = False,
) -> None:
    """Write the study's page and result file beside its journal, and print the result."""
    from kvtune.cli.options import print_json
    from kvtune.tune.sweep import keep_result

    page = _write_page(journal, by, Path(result.recipe) if result.recipe else None)
    content = {**result.to_json(), "study": str(journal), "page": str(page)}
    keep_result(content, journal)
    if as_json:
        print_json(content)
    else:
        print_results(result, trials, by)
        print(f"journal   {journal}\npage      {page}")
    if opened:
        from kvtune.cli.views.browser import open_page

        open_page(page)


def interrupted(journal: StudyJournal) -> int:
    """Say how to go on after Ctrl-C; the exit code."""
    always(f"kvtune: interrupted after {len(journal.trials)} trials")
    always(f"  next: the same command with --study {journal.path} goes on")
    return EXIT_INTERRUPTED


def _write_page(journal: Path, by: Objective, recipe: Path | None) -> Path:
    """The study's page beside its journal; an earlier page of the same journal is replaced."""
    from kvtune.report.files import write_new
    from kvtune.report.pages.study import study_page
    from kvtune.tune.study import read_study, view

    html = study_page(view(read_study(journal), by, recipe))
    return write_new(html, journal.with_suffix(".html"), force=True)


def _cells(t: Trial) -> tuple[str, str, str]:
    hit, ttft, rate = (OBJECTIVES[n].of(t.summary) for n in ("hit-rate", "ttft", "throughput"))
    return (
        f"{100 * hit:.1f} %" if hit is not None else "–",
        f"{ttft:.1f} ms" if ttft is not None else "–",
        f"{rate:,.0f}" if rate is not None else "–",
    )


def _figures(t: Trial) -> str:
    hit, ttft, rate = _cells(t)
    return f"hits {hit}, ttft {ttft}, {rate} tok/s"


def _text(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
