"""Text that fits a terminal: tables drop whole columns, never digits; a command stays on one line, to be copied.

A table of which not even the columns that must stay fit becomes a few lines of `name  value` for each row.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

LONGEST_WORD = 24
"""Longer words of a folding column, such as paths, may be broken."""
LONGEST_HEAD = 12
"""Longer words of a head, such as a run's name, may be broken."""
NARROWEST = 20
"""Columns in which folded text is still read easily."""
PIECE = re.compile(r"`[^`]*`\S*|\S+")
COLUMN_STARTS = re.compile(r"\S {2,}(?=\S)|^ +")


def width(piped: int) -> int:
    """The columns of the terminal that standard output is; `piped` where it is none."""
    return shutil.get_terminal_size((piped, 24)).columns if sys.stdout.isatty() else piped


def folded(line: str, width: int) -> list[str]:
    """The line, cut between words where it is too long; what follows is indented as its last column.

    What stands between backticks is never cut, nor is a word, though it be longer than the line.
    """
    if len(line) <= width:
        return [line]
    starts = [match.end() for match in COLUMN_STARTS.finditer(line) if match.end() <= width - NARROWEST]
    indent = starts[-1] if starts else 0
    lines, current = [], line[:indent]
    empty = True
    for piece in PIECE.findall(line[indent:]):
        if not empty and len(current) + 1 + len(piece) > width:
            lines.append(current)
            current, empty = " " * indent, True
        current, empty = current + piece if empty else f"{current} {piece}", False
    return [*lines, current]


def command(text: str, style: str = "") -> Text:
    """A command on a line of its own, also where it is longer than the terminal: print it with `crop=False`."""
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ignore")


@dataclass(frozen=True, slots=True)
class Column:
    """`rank` 0: always shown; else dropped where there is no room, the highest first. `folds`: text, not digits.

    `least`: a folding column is not made narrower than this to keep columns that can be dropped.
    """

    head: str
    right: bool = True
    folds: bool = False
    rank: int = 0
    least: int = 8


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
        yield self._table(shown, options.max_width)
        dropped = [c.head for number, c in enumerate(self.columns) if number not in shown]
        if dropped:
            yield Text(f"(no room for: {', '.join(dropped)})", style="dim")

    def lines(self, width: int) -> list[str]:
        """The table as plain text."""
        import io

        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=width, color_system=None, highlight=False).print(self)
        return [line.rstrip() for line in out.getvalue().splitlines()]

    def _fitting(self, width: int) -> list[int] | None:
        """The numbers of the columns that fit, or None where those of rank 0 do not."""
        shown = list(range(len(self.columns)))
        while sum(self._least(n) for n in shown) + self.gap * (len(shown) - 1) > width:
            droppable = [n for n in shown if self.columns[n].rank]
            if not droppable:
                return None
            shown.remove(max(droppable, key=lambda n: (self.columns[n].rank, n)))
        return shown

    def _cells(self, number: int) -> int:
        from rich.cells import cell_len

        return max((cell_len(row[number]) for row in self.rows), default=0)

    def _least(self, number: int) -> int:
        """The narrowest that this column can be without a cut number."""
        from rich.cells import cell_len

        column, cells = self.columns[number], self._cells(number)
        head = max((cell_len(word) for word in column.head.split()), default=0)
        if column.folds:
            words = (cell_len(word) for row in self.rows for word in row[number].split())
            longest = min(max(words, default=0), LONGEST_WORD)
            cells = min(cells, max(longest, column.least))
        return max(min(head, LONGEST_HEAD), cells)

    def _widths(self, shown: Sequence[int], width: int) -> dict[int, int]:
        """As wide as its longest cell or head; where that is too much, the widest spare is taken first."""
        least = {n: self._least(n) for n in shown}
        widths = {n: max(least[n], self._cells(n), len(self.columns[n].head)) for n in shown}
        while sum(widths.values()) + self.gap * (len(shown) - 1) > width:
            spare = max(shown, key=lambda n: widths[n] - least[n])
            widths[spare] -= 1
        return widths

    def _table(self, shown: Sequence[int], width: int) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, padding=(0, self.gap, 0, 0), header_style="dim", pad_edge=False)
        for number, columns in self._widths(shown, width).items():
            column = self.columns[number]
            table.add_column(
                Text(column.head, style="" if number else "bold"),
                justify="right" if column.right and number else "left",
                overflow="fold",
                width=columns,
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
