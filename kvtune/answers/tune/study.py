"""Reads a study's journal, also while the study runs, and computes what its page shows. Writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import structs

from kvtune.answers.tune.confirm import Contender, figures_of, judge, outcome_of
from kvtune.answers.tune.effects import around
from kvtune.answers.tune.objective import Objective, axes, front
from kvtune.answers.tune.result import EngineRuns, Finalist, Kind, Outcome, Place, StudyView, Trial
from kvtune.answers.tune.sweep import RESULT, result
from kvtune.answers.tune.ties import best, tied
from kvtune.answers.tune.trials.journal import FORMAT, MOST_BYTES, Head, decoded, trials_in
from kvtune.base.bounded import MOST_TOML
from kvtune.base.errors import KvtuneError, UsageError, reason
from kvtune.base.files import open_regular, read_regular, real
from kvtune.data.flags import without_overridden
from kvtune.lab.engine.experiment import BASELINE
from kvtune.lab.setup.setup import Setup

START = b'{"kvtune_journal"'


@dataclass(frozen=True, slots=True)
class Study:
    kind: Kind
    setup: Setup
    trials: tuple[Trial, ...]


@dataclass(frozen=True, slots=True)
class _Confirmation:
    """The outcome of a tuning's engine runs, and `why`; without an outcome, `why` there is none.

    `best`: the last engine trial of the winner or, without a winner, of the best setting. `baseline`: stock's last.
    """

    outcome: Outcome | None = None
    why: str = ""
    best: Trial | None = None
    baseline: Trial | None = None


class _Numbered(msgspec.Struct, frozen=True):
    number: int


class SavedResult(msgspec.Struct, frozen=True):
    """The fields that the page needs from the result file, which a study's command writes beside the journal."""

    trials: tuple[_Numbered, ...]
    objective: str = ""
    objectives: tuple[str, ...] = ()
    finalists: tuple[Finalist, ...] = ()
    verdict: Outcome = Outcome()
    recipe: str | None = None


def is_study(path: Path) -> bool:
    """Whether a file's first bytes are those of a study's journal."""
    try:
        with open_regular(path) as file:
            return file.read(len(START)) == START
    except OSError:
        return False


def read_study(path: Path, *, own: bool = False) -> Study:
    """Read a journal without its lock, as the study may be running. An incomplete last line is ignored.

    `own`: the calling command wrote the journal, so the run files' paths are used as written; otherwise run files are
    looked for beside the journal.
    """
    try:
        lines = read_regular(path, MOST_BYTES).split(b"\n")[:-1]
        head = decoded(lines[0], Head) if lines else None
        setup = Setup.of_file(head.bench if head is not None else {})
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is not a readable study: {reason(error)}",
            "give the .jsonl file of a sweep or a tune",
        ) from error
    if head is None or head.kvtune_journal != FORMAT:
        raise UsageError(f"{path} is a study of another format", f"this kvtune reads format {FORMAT}")
    trials = []
    for _, trial in trials_in(lines[1:], path, "remove the line and run the command again"):
        file = trial.run_file if own else str(_beside(path, trial.run_file) or "")
        trials.append(structs.replace(trial, run_file=file))
    return Study(head.kind, setup, tuple(trials))


def saved_result(journal: Path, study: Study) -> SavedResult | None:
    """Return the result that the study's own command stored; None without one, or if trials were added since."""
    try:
        saved = decoded(read_regular(journal.with_suffix(RESULT), MOST_BYTES), SavedResult)
    except (OSError, ValueError):
        return None
    return saved if {t.number for t in saved.trials} == {t.number for t in study.trials} else None


def recipe_of(journal: Path, saved: SavedResult | None) -> Path | None:
    """Return the recipe file that the study wrote in the journal's folder; None if it does not exist."""
    written = saved.recipe if saved is not None and saved.recipe else ""
    places = (_beside(journal, written), journal.with_suffix(".toml"))
    return next((p for p in places if p is not None and p.is_file()), None)


def _beside(journal: Path, named: str) -> Path | None:
    """Return the path of a file that a journal or result names, always below the journal's folder.

    A journal may come from anyone, so a path elsewhere is not opened: a file of the same name beside the journal is
    returned instead, which also finds files that were moved together with the journal.
    """
    name = Path(named).name
    if not name or "\0" in named:
        return None
    folder = real(journal).parent
    written = real(Path(named))
    return written if written.is_relative_to(folder) and written.is_file() else folder / name


def view(
    study: Study, objective: Objective, recipe: Path | None = None, saved: SavedResult | None = None
) -> StudyView:
    """Return the study as its page shows it. `recipe`: the file that the study wrote. `saved`: the stored result."""
    outcome = result(study.trials, objective)
    drawn_on = _busiest(study.trials)
    drawn = [t for t in study.trials if t.role == "trial" and t.on == drawn_on]
    chosen = best(drawn, objective)
    if saved is not None and (*saved.objectives, saved.objective)[0] != objective.name:
        saved = None
    rows, confirmation = _engine_runs(study.trials, objective, saved)
    text = ""
    if recipe is not None:
        try:
            text = read_regular(recipe, MOST_TOML).decode()
        except (OSError, ValueError):
            recipe = None
    if study.kind != "tune":
        confirmation = None
    shown = confirmation.outcome if confirmation is not None else None
    if confirmation is not None:
        outcome = structs.replace(
            outcome,
            best=confirmation.best or outcome.best,
            baseline=confirmation.baseline or outcome.baseline,
            verdict=shown or structs.replace(outcome.verdict, winner=False),
        )
    leader = outcome.best
    if leader is not None:
        chosen = next((t for t in drawn if t.state == "complete" and t.settings == leader.settings), chosen)
    replays = [t for t in drawn if t.state == "complete" and t.on == "sim"]
    return StudyView(
        setup=study.setup,
        tied=len(tied(leader, replays, objective)) if leader is not None and leader.on == "sim" else 0,
        result=structs.replace(outcome, kind=study.kind, recipe=str(recipe) if recipe else None),
        drawn_on=drawn_on,
        best_flags=tuple(
            without_overridden(study.setup.with_knobs(leader.settings if leader else {}).engine_args)
        ),
        effects=tuple(around(chosen, drawn, objective)) if chosen is not None and drawn_on == "sim" else (),
        front=tuple(t.number for t in front(drawn, axes(objective))),
        axes=tuple(o.name for o in axes(objective)),
        engine_runs=rows,
        why=confirmation.why if confirmation else "",
        drift_ttft=shown.drift_ttft or None if shown is not None else None,
        recipe_text=text,
    )


def _busiest(trials: Sequence[Trial]) -> Place:
    """Return `engine` or `sim`, whichever completed more trials. The page's charts need many trials."""
    places = [t.on for t in trials if t.role == "trial" and t.state == "complete"]
    return "engine" if 2 * places.count("engine") > len(places) else "sim"


def _engine_runs(
    trials: Sequence[Trial], objective: Objective, saved: SavedResult | None
) -> tuple[tuple[EngineRuns, ...], _Confirmation | None]:
    """Return a row for stock and each setting with several engine runs, and what these runs show."""
    stock = Contender(BASELINE, {})
    sides: dict[str, Contender] = {}
    for t in trials:
        if t.on != "engine" or t.state != "complete":
            continue
        side = stock if t.role == "baseline" else sides.setdefault(t.key, Contender("trial", t.settings))
        side.trials.append(t)
    repeated = [side for side in sides.values() if len(side.trials) > 1]
    if not repeated or not stock.trials:
        return (), None
    _read_runs(stock)
    for side in repeated:
        _read_runs(side)
    whole = all(side.runs for side in (stock, *repeated))
    # The saved intervals were computed before the run files were deleted.
    kept = () if whole or saved is None else saved.finalists
    rows = tuple(_row(side, stock, objective, kept) for side in (stock, *repeated))
    if whole:
        judged = judge(stock, repeated, objective)
        best = judged.leader.trials[-1] if judged.leader is not None else None
        return rows, _Confirmation(outcome_of(judged, objective), judged.why, best, stock.trials[-1])
    if saved is not None and kept:
        numbers = [n for f in kept if f.winner for n in f.trials]
        best = next((t for t in reversed(trials) if t.number in numbers), None)
        return rows, _Confirmation(saved.verdict, best=best)
    return rows, _Confirmation(why="run files of the finalists are gone, so no interval can be given again")


def _read_runs(side: Contender) -> None:
    from kvtune.data.run.file import read_run

    for trial in side.trials:
        try:
            side.runs.append(read_run(Path(trial.run_file)))
        except KvtuneError:
            continue  # its run file is gone: the trial's own figures are still shown


def _row(side: Contender, stock: Contender, objective: Objective, saved: Sequence[Finalist]) -> EngineRuns:
    row = EngineRuns(
        settings=side.settings,
        core=side.trials[0].core,
        values=tuple(value for t in side.trials if (value := objective.of(t.summary)) is not None),
    )
    if side is stock:
        return structs.replace(row, why="the baseline")
    figures = next((f.figures for f in reversed(saved) if f.settings == side.settings), ())
    there = bool(side.runs and stock.runs)
    figure = objective.among(figures) or (objective.among(figures_of(stock, side)) if there else None)
    if figure is None and not there:
        return structs.replace(row, why="its run files are gone")
    return row if figure is None else structs.replace(row, figure=figure, why=figure.why)
