"""Tables that fit a terminal: too wide a table drops whole columns, never digits.

Where not even the columns that must stay fit, each row becomes a few lines of `name  value`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

FOLDED = 14
"""Columns that text of a folding column gets at least."""


@dataclass(frozen=True, slots=True)
class Column:
    """`rank` 0: always shown; else dropped where there is no room, the highest first. `folds`: text, not digits."""

    head: str
    right: bool = True
    folds: bool = False
    rank: int = 0


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A rich renderable. The first column's head is bold: it is the table's title. `styles`: of a row's last cell."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    styles: Sequence[str] = ()
    gap: int = 3

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        shown = self._fitting(options.max_width)
        if shown is None:
            yield from self._as_lines()
            return
        yield self._table(shown)
        dropped = [c.head for number, c in enumerate(self.columns) if number not in shown]
        if dropped:
            yield Text(f"(no room for: {', '.join(dropped)})", style="dim")

    def _fitting(self, width: int) -> list[int] | None:
        """The numbers of the columns that fit, or None where those of rank 0 do not."""
        shown = list(range(len(self.columns)))
        while sum(self._least(n) + self.gap for n in shown) - self.gap > width:
            droppable = [n for n in shown if self.columns[n].rank]
            if not droppable:
                return None
            shown.remove(max(droppable, key=lambda n: (self.columns[n].rank, n)))
        return shown

    def _least(self, number: int) -> int:
        from rich.cells import cell_len

        column = self.columns[number]
        cells = max((cell_len(row[number]) for row in self.rows), default=0)
        words = max((cell_len(word) for word in column.head.split()), default=0)
        return max(words, min(cells, FOLDED) if column.folds else cells)

    def _table(self, shown: Sequence[int]) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, self.gap, 0, 0), header_style="dim", pad_edge=False)
        for number in shown:
            column = self.columns[number]
            table.add_column(
                Text(column.head, style="" if number else "bold"),
                justify="right" if column.right and number else "left",
                no_wrap=False,
                min_width=self._least(number),
            )
        for at, row in enumerate(self.rows):
            table.add_row(*(self._cell(at, row, number) for number in shown))
        return table

    def _cell(self, at: int, row: Sequence[str], number: int) -> Text:
        from rich.text import Text

        last = number == len(self.columns) - 1
        return Text(row[number], style=self.styles[at] if self.styles and last else "")

    def _as_lines(self) -> RenderResult:
        from rich.text import Text

        heads = [column.head for column in self.columns]
        yield Text(heads[0], style="bold")
        for at, row in enumerate(self.rows):
            yield Text(row[0])
            for number in range(1, len(heads)):
                yield Text(f"  {heads[number]} ", style="dim").append_text(self._cell(at, row, number))
