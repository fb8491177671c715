"""What a section holds, the same for page and terminal: tables, facts, notes, charts. Plain data.

A table is made once: a page draws it whole, a terminal its `terse` form with fewer columns and rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from kvtune.terminal import Column, FittedTable

Spec = dict[str, Any]
"""A Vega-Lite specification, as JSON."""

Value = bool | int | float | str | None
Columns = Mapping[str, list[Value]]
"""A chart's data, ready for JSON."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: the text shown, the value it sorts by (None: its text), a CSS class of ours, and a page's tooltip."""

    text: str
    value: float | None = None
    css: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table for people. A column's rank and folding are for terminals, where it may have no room."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(column.head for column in self.columns)

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Which columns hold numbers; these are right-aligned."""
        return tuple(any(row[i].value is not None for row in self.rows) for i in range(len(self.heads)))

    def terse(self, title: str, *heads: str, most: int | None = None) -> Grid:
        """The table for a terminal: these columns, the first renamed to `title`, and the first `most` rows."""
        at = [self.heads.index(head) for head in heads]
        columns = [self.columns[i] for i in at]
        columns[0] = Column(title, folds=True, least=14)
        return Grid(tuple(columns), tuple(tuple(row[i] for i in at) for row in self.rows[:most]))

    def fitted(self, gap: int = 3, styles: Sequence[str] = ()) -> FittedTable:
        """The table as a terminal draws it. `styles`: one for each row's last cell."""
        return FittedTable(self.columns, [[cell.text for cell in row] for row in self.rows], styles, gap)


def grid(heads: Sequence[str | Column], rows: Iterable[Sequence[object]], caption: str = "") -> Grid:
    """A Grid of plain values: a cell may be a Cell, text or a number (shown as it is)."""
    made = tuple(tuple(_cell(value) for value in row) for row in rows)
    return Grid(tuple(h if isinstance(h, Column) else Column(h) for h in heads), made, caption)


def _cell(value: object) -> Cell:
    if isinstance(value, Cell):
        return value
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        number = float(value)
        return Cell("–" if math.isnan(number) else f"{number:,.6g}", number)
    return Cell(str(value))


def cell(value: float | None, text: Callable[[float], str]) -> Cell:
    """A number as `text` writes it; a dash where there is none."""
    return Cell("–") if value is None else Cell(text(value), value)


@dataclass(frozen=True, slots=True)
class Tile:
    """A main figure: `First token`, `687 ms`, `median, p99 2.74 s`."""

    name: str
    value: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """`label` says in words what the picture shows, with its main figures; `note` says what was left out."""

    id: str
    title: str
    label: str
    spec: Spec
    grid: Grid
    data: Mapping[str, Columns]  # the columns that the spec names
    note: str = ""
    zoom: float = 0.0  # seconds of the shared time axis; 0: the chart does not zoom


@dataclass(frozen=True)
class Section:
    """A part of a page, drawn by `templates/<template>`: tables, notes, facts, charts, in this order.

    `draw` makes the charts, which only pages need. `terminal`: what `--verbose` prints of it, tables and paragraphs.
    """

    id: str
    title: str
    lead: str = ""
    template: str = "section.html"
    tables: tuple[Grid, ...] = ()
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    draw: Callable[[], Iterable[Chart | None]] = tuple
    beside: bool = False  # the charts stand two in a row
    values: Mapping[str, object] = field(default_factory=dict)
    terminal: tuple[Grid | str, ...] = ()

    @cached_property
    def charts(self) -> tuple[Chart, ...]:
        return tuple(chart for chart in self.draw() if chart is not None)

    @property
    def data(self) -> dict[str, Columns]:
        """The columns of all its charts, by name."""
        return {name: columns for chart in self.charts for name, columns in chart.data.items()}
