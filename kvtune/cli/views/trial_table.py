"""The table of trials on a terminal: the baseline is a row, and settings with equal results are one row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from kvtune.analysis.figures import FIGURES
from kvtune.analysis.knobs import knob_note
from kvtune.analysis.study import Trial
from kvtune.recipe import Scalar, text_of
from kvtune.terminal import Column, FittedTable
from kvtune.tune.objective import OBJECTIVES
from kvtune.tune.space.grid import shown

SHOWN = ("hit-rate", "ttft", "throughput")
"""The objectives that are columns of every table; the ceiling, where a trial has one."""
KNOB_COLUMNS = 3
"""With more knobs than this, a narrow terminal has one column of settings."""
WIDE = 120


@dataclass(frozen=True, slots=True)
class Row:
    """Trials with the same place, core, state and printed figures; the row shows the first one."""

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
        """The knob's value, or all values if the row holds every combination of its trials' values."""
        values = self._values(knob)
        return ", ".join(map(_text, values)) if self._is_grid() else _text(self.first.settings.get(knob))

    def settings(self, knobs: Sequence[str]) -> str:
        words = [f"{knob}={self.value(knob).replace(' ', '')}" for knob in knobs if self.value(knob)]
        return " ".join(words) or ("" if self.first.role == "baseline" else "defaults")

    def _values(self, knob: str) -> list[Scalar | None]:
        return list(dict.fromkeys(trial.settings.get(knob) for trial in self.trials))

    def _is_grid(self) -> bool:
        knobs = dict.fromkeys(name for trial in self.trials for name in trial.settings)
        return prod(len(self._values(knob)) for knob in knobs) == len(self.trials)


def folded_rows(trials: Sequence[Trial]) -> list[Row]:
    """The trials in their order; equal ones are at the place of the first."""
    rows: dict[tuple[object, ...], list[Trial]] = {}
    for trial in trials:
        printed = (figure(trial, name) for name in (*SHOWN, "ceiling"))
        alike = (trial.on, trial.core, trial.role, trial.state, trial.why, *printed)
        rows.setdefault(alike, []).append(trial)
    return [Row(tuple(same)) for same in rows.values()]


def table(rows: Sequence[Row], width: int) -> FittedTable:
    """Columns that are the same in every row are left out; `common` names such knobs."""
    trials = [trial for row in rows for trial in row.trials]
    knobs = varied(trials)
    apart = len(knobs) <= KNOB_COLUMNS or width >= WIDE
    places = {trial.on for trial in trials}
    predicted = ", predicted" if places == {"sim"} else ""
    columns = [Column("trial", right=False, folds=True, least=9)]
    cells = [[row.name] for row in rows]
    if len(places) > 1:
        columns.append(Column("on", right=False))
        _add(cells, [row.first.on for row in rows])
    if apart:
        columns += [Column(knob_note(knob).head, right=False, folds=True) for knob in knobs]
        for knob in knobs:
            _add(cells, [row.value(knob) for row in rows])
    else:
        columns.append(Column("settings", right=False, folds=True, least=24))
        _add(cells, [row.settings(knobs) for row in rows])
    for rank, name in enumerate(SHOWN):
        shown_as = FIGURES[OBJECTIVES[name].path]
        columns.append(Column(f"{shown_as.short}{predicted if rank else ''}", rank=rank))
        _add(cells, [figure(row.first, name) for row in rows])
    if any(OBJECTIVES["ceiling"].of(row.first.summary) is not None for row in rows):
        columns.append(Column(FIGURES[OBJECTIVES["ceiling"].path].short))
        _add(cells, [figure(row.first, "ceiling") for row in rows])
    if any(trial.state != "complete" for trial in trials):
        columns.append(Column("why not complete", right=False, folds=True, least=12))
        _add(cells, ["" if row.first.state == "complete" else row.first.why for row in rows])
    return FittedTable(columns, cells, gap=2)


def _add(cells: list[list[str]], column: Sequence[str]) -> None:
    for row, cell in zip(cells, column, strict=True):
        row.append(cell)


def named(trials: Sequence[Trial]) -> list[str]:
    """Every knob that a trial sets."""
    return list(dict.fromkeys(name for trial in trials for name in trial.settings))


def varied(trials: Sequence[Trial]) -> list[str]:
    """The knobs that a table has columns for: those with more than one value; all of a single trial's."""
    tried = [trial for trial in trials if trial.role == "trial"]
    if len(tried) < 2:
        return named(trials)
    return [knob for knob in named(tried) if len({repr(trial.settings.get(knob)) for trial in tried}) > 1]


def common(trials: Sequence[Trial]) -> str:
    """`policy=first`: the settings that all trials share; empty if there are none."""
    tried = [trial for trial in trials if trial.role == "trial"]
    same = [knob for knob in named(tried) if knob not in varied(trials)]
    return shown({knob: tried[0].settings[knob] for knob in same}) if same else ""


def figure(trial: Trial, name: str) -> str:
    """The figure of an objective, as printed."""
    by = OBJECTIVES[name]
    return FIGURES[by.path].text(by.of(trial.summary))


def _text(value: Scalar | None) -> str:
    return "" if value is None else text_of(value)
