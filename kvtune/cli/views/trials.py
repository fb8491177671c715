"""Shows trials: a live table on stderr while they run, and the table of results on stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from kvtune.answers.tune.objective import Objective
from kvtune.answers.tune.result import Place, StudyResult, Trial, study_identity
from kvtune.answers.tune.rows import MAIN, best_first, folded_rows, phrase_of, terse, value_of
from kvtune.answers.tune.space.grid import shown
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.base.errors import EXIT_INTERRUPTED
from kvtune.cli.notices import always
from kvtune.cli.views.plan import minutes
from kvtune.cli.views.progress import Ticker
from kvtune.data.show.terminal import console

LIVE_ROWS = 12


class TrialsView:
    """Shows trials as they end. Call it with each trial. Without a terminal each trial is a line.

    `total`: how many run in one `place`. How many engine runs confirm them is not known: they are counted as they come.
    """

    def __init__(self, total: int, objective: Objective, place: Place = "sim") -> None:
        self._total, self._by, self._place = total, objective, place
        self._trials: list[Trial] = []
        self._ran, self._took_s = 0, 0.0
        self._console = console(stderr=True)
        self._phase = "starting"
        self._began = self._last = monotonic()
        self._ticker = Ticker(self._done)
        self._live = Live(console=self._console, transient=True, get_renderable=self._drawn)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start(refresh=True)
        else:
            print(self._done(), file=sys.stderr, flush=True)
            self._ticker.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        else:
            self._ticker.__exit__(kind, error, trace)

    def __call__(self, trial: Trial) -> None:
        self._trials.append(trial)
        before, self._last = self._last, monotonic()
        if trial.on == self._place:
            self._ran += 1
            self._took_s += self._last - before
        if not self._console.is_terminal:
            self._ticker.said()
            name = "stock (baseline) on" if trial.role == "baseline" else f"trial {trial.number} on"
            name += f" {trial.on}, "
            outcome = trial.why if trial.state == "failed" else _outcome(trial)
            line = f"{self._counted()}: {name}{shown(trial.settings)}, {outcome}"
            print(line, file=sys.stderr, flush=True)

    def phase(self, text: str) -> None:
        """Name what begins. A search that ended before its last trial has no more of them."""
        self._phase = text
        if self._ran:
            self._total = 0
        if not self._console.is_terminal:
            self._ticker.said()
            print(text, file=sys.stderr, flush=True)

    def _done(self) -> str:
        """Return the state in words: `3 of 9 trials done, searching in simulation, 12 s so far, about 24 s left`."""
        left = ""
        if 0 < self._ran < self._total:
            left = f", about {minutes(self._took_s / self._ran * (self._total - self._ran))} left"
            left += " of the replays" if len(self._trials) > self._ran else ""
        took = minutes(monotonic() - self._began)
        return f"{self._counted(' trials')} done, {self._phase}, {took} so far{left}"

    def _counted(self, noun: str = "") -> str:
        """Return `3 of 9`; `10` where there are more than were planned; engine runs that were not planned beside it."""
        others = len(self._trials) - self._ran
        whole = f" of {self._total}" if self._total >= self._ran else ""
        counts = [f"{self._ran}{whole}{noun}"] if self._total or self._ran else []
        if others or not counts:
            counts.append(f"{others} engine run{'' if others == 1 else 's'}")
        return " and ".join(counts)

    def _drawn(self) -> RenderableType:
        rows = folded_rows(best_first(self._trials, self._by.name))[:LIVE_ROWS]
        title = Text(self._done(), style="italic")
        return Group(title, terse(rows, self._by.name).fitted(2)) if rows else title


def finish(
    result: StudyResult,
    journal: Path,
    objective: Objective,
    *,
    as_json: bool,
    opened: bool = False,
    force: bool = False,
) -> None:
    """Write the study's page and result file beside its journal, and print the result."""
    from msgspec import structs

    from kvtune.answers.tune.document import document
    from kvtune.answers.tune.study import read_study, view
    from kvtune.answers.tune.sweep import keep_result
    from kvtune.cli.options import print_json
    from kvtune.data.run.signature import write_own
    from kvtune.data.show.page import document_page
    from kvtune.data.show.screen import print_document

    study = view(read_study(journal, own=True), objective, Path(result.recipe) if result.recipe else None)
    if result.kind == "sweep":  # a note may come from replays that the journal does not have
        study = structs.replace(study, result=structs.replace(study.result, notes=result.notes))
    identity, page = study_identity(study.result.kind, study.setup), journal.with_suffix(".html")
    content = {**result.to_json(), "study": str(journal), "page": str(page)}
    shown = document(study)
    write_own(document_page(shown).encode(), page, identity, force=force)
    keep_result(content, journal, identity, force=force)
    if as_json:
        print_json(content)
    else:
        print_document(shown)
        print(f"journal   {journal}\npage      {page}")
    if opened:
        from kvtune.cli.views.answer import open_page

        open_page(page)


def interrupted(journal: StudyJournal) -> int:
    """Print how to resume the study after Ctrl-C, and return the exit code."""
    always(f"kvtune: interrupted after {len(journal.trials)} trials")
    always(f"  next: the same command with --study {journal.path} goes on")
    return EXIT_INTERRUPTED


def _outcome(trial: Trial) -> str:
    names = MAIN if value_of(trial, "ceiling") is None else (*MAIN, "ceiling")
    return ", ".join(phrase_of(trial, name) for name in names)
