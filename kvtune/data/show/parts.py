"""What an answer consists of, the same for page, terminal and Markdown: a headline, and sections of tables and words.

Plain data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from kvtune.data.show.terminal import Column, FittedTable

Spec = dict[str, Any]
"""A Vega-Lite specification, as JSON."""

Value = bool | int | float | str | None
Columns = Mapping[str, list[Value]]
"""A chart's data, ready for JSON."""


STYLES = {"better": "green", "worse": "red", "quiet": "dim"}
"""How a terminal draws a row's last cell, by its CSS class."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: the text shown, the value it sorts by (None: its text), a CSS class of page.css, a tooltip on pages."""

    text: str
    value: float | None = None
    css: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table for page and terminal. Only a terminal uses `rank` and `folds` of its columns, to fit its width."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""

    @property
    def heads(self) -> tuple[str, ...]:
        return tuple(column.head for column in self.columns)

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether each column has numbers and is right-aligned."""
        return tuple(any(row[i].value is not None for row in self.rows) for i in range(len(self.heads)))

    def filled(self) -> Grid:
        """Return the table without the columns in which every cell is empty or a dash."""
        if not self.rows:
            return self
        kept = [i for i in range(len(self.heads)) if any(row[i].text not in ("", "–") for row in self.rows)]
        rows = tuple(tuple(row[i] for i in kept) for row in self.rows)
        return Grid(tuple(self.columns[i] for i in kept), rows, self.caption)

    def fitted(self, gap: int = 3) -> FittedTable:
        """Return the table as a terminal draws it."""
        styles = [STYLES.get(row[-1].css, "") for row in self.rows]
        return FittedTable(self.columns, [[cell.text for cell in row] for row in self.rows], styles, gap)


def grid(heads: Sequence[str | Column], rows: Iterable[Sequence[object]], caption: str = "") -> Grid:
    """Make a Grid. A value may be a Cell, text, or a number, which is shown with six digits."""
    made = tuple(tuple(_cell(value) for value in row) for row in rows)
    return Grid(tuple(h if isinstance(h, Column) else Column(h) for h in heads), made, caption)


def grid_of(rows: Iterable[Mapping[Any, object]], caption: str = "") -> Grid:
    """Make a Grid of rows that have the same columns: what each shows, by the columns or their heads."""
    made = list(rows)
    return grid(tuple(made[0]) if made else (), [list(row.values()) for row in made], caption)


def _cell(value: object) -> Cell:
    if isinstance(value, Cell):
        return value
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        number = float(value)
        return Cell("–" if math.isnan(number) else f"{number:,.6g}", number)
    return Cell(str(value))


def cell(value: float | None, text: Callable[[float], str]) -> Cell:
    """Make a cell of a number, which `text` formats; a dash for None."""
    return Cell("–") if value is None else Cell(text(value), value)


@dataclass(frozen=True, slots=True)
class Tile:
    """A main figure, such as `First token`, `687 ms`, `median, p99 2.74 s`."""

    name: str
    value: str
    more: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart. `label` says in words what the chart shows, with the main figures; `note`: which data are not drawn."""

    id: str
    title: str
    label: str
    spec: Spec
    grid: Grid
    data: Mapping[str, Columns]  # by the names that the spec uses
    note: str = ""
    zoom: float = 0.0  # seconds of the shared time axis; 0: the chart does not zoom


@dataclass(frozen=True, slots=True)
class Banner:
    """A warning above all sections. `lines`: in a folded list on pages."""

    css: Literal["bad", "warn", "info"]
    title: str
    text: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    """A part of an answer.

    `draw` makes the charts, for pages only; `fold`: the title under which a page shows them closed. `folded`: tables
    and texts that a page shows closed, by their titles. `page_only`: terminals and Markdown leave the section out.
    `commands`: what to type, complete; each alone, or after the words that say what it does.
    """

    id: str
    title: str
    lead: str = ""
    tiles: tuple[Tile, ...] = ()
    tables: tuple[Grid, ...] = ()
    notes: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    draw: Callable[[], Iterable[Chart | None]] = tuple
    beside: bool = False  # the charts stand two in a row
    fold: str = ""
    commands: tuple[str | tuple[str, str], ...] = ()
    folded: Mapping[str, Grid | str] = field(default_factory=dict)
    page_only: bool = False

    @property
    def in_words(self) -> tuple[Grid, ...] | None:
        """The tables that terminals and Markdown show, without empty columns; None if they leave the section out."""
        tables = tuple(table.filled() for table in self.tables if table.rows)
        content = self.lead or self.tiles or self.facts or tables or self.notes or self.commands
        return tables if content and not self.page_only else None

    @property
    def asked(self) -> Iterator[tuple[str, str]]:
        """Yield each command after the words that say what it does."""
        yield from (each if isinstance(each, tuple) else ("", each) for each in self.commands)

    @cached_property
    def charts(self) -> tuple[Chart, ...]:
        return tuple(chart for chart in self.draw() if chart is not None)

    @property
    def page_tables(self) -> list[Grid]:
        """The tables that a page does not have under a chart."""
        drawn = [chart.grid for chart in self.charts]
        return [table.filled() for table in self.tables if table.rows and table not in drawn]

    @property
    def data(self) -> dict[str, Columns]:
        """The data of all charts of the section, by name."""
        return {name: columns for chart in self.charts for name, columns in chart.data.items()}


@dataclass(frozen=True)
class Document:
    """What a command answers. `headline`: one sentence with the figure that binds; the sections say the rest.

    `name`: the command; `subject`: what was asked about, such as a model; `title`: of a page's window; `closing`: what
    the answer took, on terminals. `identity`: tells the page's file from others (data/run/signature.py).
    """

    name: str
    subject: str
    headline: str
    sections: tuple[Section, ...]
    identity: str
    title: str = ""
    banners: tuple[Banner, ...] = ()
    closing: str = ""
