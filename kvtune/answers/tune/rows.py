"""The tables of trials: each trial with every figure, or trials of equal results in one row with the main figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod

from kvtune.answers.tune.objective import OBJECTIVES
from kvtune.answers.tune.result import EngineRuns, Trial
from kvtune.data.knobs import knob_of
from kvtune.data.recipe import Scalar, text_of
from kvtune.data.show.parts import Cell, Grid, grid_of
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.figures import FIGURES, Quantity

MAIN = ("hit-rate", "ttft", "throughput")
"""The objectives that a terminal shows, and also the host ceiling (most output tokens/s) if a trial has one."""
NOT_IN_EVERY_RUN = ("goodput", "ceiling")
RANKS = {"ttft": 1, "throughput": 2}
KNOB_COLUMNS = 3
"""All settings stand in one column if there are more knobs than this."""


def shown_as(objective: str) -> Quantity:
    """Return the figure that an objective stands for."""
    return FIGURES[OBJECTIVES[objective].path]


def value_of(trial: Trial, objective: str) -> float | None:
    """Return the objective's stored value, or None if the trial has none."""
    return OBJECTIVES[objective].of(trial.summary)


def figure_of(trial: Trial, objective: str) -> float | None:
    """Return the objective's value in the unit of its column, for instance percent instead of a share."""
    value = value_of(trial, objective)
    return None if value is None else shown_as(objective).scaled(value)


def number_of(trial: Trial, objective: str) -> str:
    return shown_as(objective).number(value_of(trial, objective))


def quantity_of(trial: Trial, objective: str) -> str:
    """Return the objective's value with its unit."""
    return shown_as(objective).text(value_of(trial, objective))


def phrase_of(trial: Trial, objective: str) -> str:
    """Return the objective's name and value for a sentence: `hit rate 41.8 %`."""
    return f"{shown_as(objective).short} {quantity_of(trial, objective)}"


def settings_text(trial: Trial | EngineRuns) -> str:
    core = "stock vLLM" if trial.core == "stock" else "kvtune core"
    return f"{core}, {', '.join(f'{n} {text_of(v)}' for n, v in trial.settings.items()) or 'defaults'}"


@dataclass(frozen=True, slots=True)
class Row:
    """Trials in one row: all simulated or all on the engine, with equal core, state and figures."""

    trials: tuple[Trial, ...]

    @property
    def first(self) -> Trial:
        return self.trials[0]

    @property
    def name(self) -> str:
        more = len(self.trials) - 1
        if self.first.role == "baseline":
            return "baseline"
        return f"{self.first.number} and {more} more" if more else str(self.first.number)

    def value(self, knob: str) -> str:
        """Return all values of the knob if the row's trials are a full grid, else the first trial's value."""
        values = self._values(knob) if self._is_grid() else [self.first.settings.get(knob)]
        if values == [None]:
            return ""
        return ", ".join("default" if value is None else text_of(value) for value in values)

    def setting(self, knob: str) -> Cell:
        value = self.first.settings.get(knob)
        number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
        return Cell(self.value(knob), number)

    def settings(self, knobs: Sequence[str]) -> str:
        words = [f"{knob}={self.value(knob).replace(' ', '')}" for knob in knobs if self.value(knob)]
        return " ".join(words) or ("" if self.first.role == "baseline" else "defaults")

    def _values(self, knob: str) -> list[Scalar | None]:
        return list(dict.fromkeys(trial.settings.get(knob) for trial in self.trials))

    def _is_grid(self) -> bool:
        return prod(len(self._values(knob)) for knob in named(self.trials)) == len(self.trials)


def folded_rows(trials: Sequence[Trial]) -> list[Row]:
    """Put trials with equal results in one row, at the place of the first of them."""
    rows: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        figures = (quantity_of(trial, name) for name in (*MAIN, "ceiling"))
        alike = (trial.on, trial.core, trial.role, trial.state, trial.why, *figures)
        rows.setdefault(alike, []).append(trial)
    return [Row(tuple(same)) for same in rows.values()]


def best_first(trials: Sequence[Trial], objective: str, best: Trial | None = None) -> list[Trial]:
    """Sort by the objective, `best` before its equals. Trials without a figure are last, after those of 0."""
    chosen = best.number if best is not None else None

    def order(trial: Trial) -> tuple[float, bool]:
        score = OBJECTIVES[objective].score(trial.summary)
        return inf if score is None else -score, trial.number != chosen

    return sorted(trials, key=order)


def whole(trials: Sequence[Trial], objective: str, best: int | None) -> Grid:
    """Make the page's table: a row for each trial, a column for each knob and each figure that a trial has."""
    names = [n for n in OBJECTIVES if n not in NOT_IN_EVERY_RUN or _has(trials, n)]
    return _table([Row((t,)) for t in trials], objective, names, named(trials), best=best)


def terse(rows: Sequence[Row], objective: str = MAIN[0]) -> Grid:
    """Make the short table, without columns that are equal in all rows; `common` names their knobs."""
    trials = [trial for row in rows for trial in row.trials]
    names = [*MAIN, "ceiling"] if _has(trials, "ceiling") else list(MAIN)
    knobs = varied(trials)
    return _table(rows, objective, names, knobs, together=len(knobs) > KNOB_COLUMNS)


def _table(
    rows: Sequence[Row],
    objective: str,
    names: Sequence[str],
    knobs: Sequence[str],
    *,
    together: bool = False,
    best: int | None = None,
) -> Grid:
    """Make a table, the objective before the settings; `on` and `state` only where they tell trials apart.

    `together`: all settings stand in one column.
    """
    trials = [trial for row in rows for trial in row.trials]
    places, states = ({getattr(trial, what) for trial in trials} for what in ("on", "state"))

    def cells(row: Row) -> Iterator[tuple[Column, Cell]]:
        first = row.first
        name = f"{row.name} (best)" if first.number == best else row.name
        yield (
            Column("trial", folds=True, least=14),
            Cell(name, float(first.number), "best" if first.number == best else ""),
        )
        if len(places) > 1:
            yield Column("on", right=False), Cell(first.on)
        yield _figure(first, objective, 0)
        if together:
            yield Column("settings", right=False, folds=True), Cell(row.settings(knobs))
        for knob in () if together else knobs:
            yield Column(knob_of(knob).head, right=False, folds=True), row.setting(knob)
        for other in names:
            if other != objective:
                yield _figure(first, other, RANKS.get(other, 3 * (other not in MAIN)))
        if states != {"complete"}:
            yield Column("state", right=False, folds=True, least=12), Cell(first.why or first.state)

    return grid_of(dict(cells(row)) for row in rows)


def _figure(trial: Trial, objective: str, rank: int) -> tuple[Column, Cell]:
    column = Column(shown_as(objective).head_with_unit, rank=rank)
    return column, Cell(number_of(trial, objective), figure_of(trial, objective))


def _has(trials: Sequence[Trial], objective: str) -> bool:
    return any(value_of(t, objective) is not None for t in trials)


def named(trials: Sequence[Trial]) -> list[str]:
    """Return every knob that a trial sets."""
    return list(dict.fromkeys(name for trial in trials for name in trial.settings))


def varied(trials: Sequence[Trial]) -> list[str]:
    """Return the knobs with a column on a terminal: those with several values, or all if there is only one trial."""
    tried = [trial for trial in trials if trial.role == "trial"]
    if len(tried) < 2:
        return named(trials)
    return [knob for knob in named(tried) if len({repr(trial.settings.get(knob)) for trial in tried}) > 1]


def common(trials: Sequence[Trial]) -> str:
    """Return the settings that all trials share, such as `policy=first`; "" if there are none."""
    tried = [trial for trial in trials if trial.role == "trial"]
    same = [knob for knob in named(tried) if knob not in varied(trials)]
    return " ".join(f"{knob}={text_of(tried[0].settings[knob])}" for knob in same)
