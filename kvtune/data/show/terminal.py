"""Prints to a terminal. Characters of a text that could control the terminal are replaced.

A table that is too wide drops whole columns, never digits. If it is still too wide, each row becomes a few lines of
`name  value`. Commands are never wrapped, so that they can be copied.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

from kvtune.base.masking import held, masked_text, masked_value

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

LONGEST_WORD = 24
"""Longer words of a folding column, such as paths, may be broken."""
LONGEST_HEAD = 12
"""Longer pieces of a column's head, such as a run's name, may be broken."""
HEAD_PIECE = re.compile(r"[^\s_]*_+|[^\s_]+|\s+")
"""A head folds between words, and after the underscores of a setting's name."""
NARROWEST = 20
"""The fewest columns in which folded text is easy to read."""
PIECE = re.compile(r"`[^`]*`\S*|\S+")
COLUMN_STARTS = re.compile(r"\S {2,}(?=\S)|^ +")
STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters except tab and line feed, and characters that reorder text (bidi)."""


def printable(text: str) -> str:
    """Return the text with its secrets hidden and U+FFFD for each character in STEERING.

    Every printed text goes through this; JSON does not (print_json).
    """
    return STEERING.sub("\ufffd", masked_text(text))


def one_line(text: str) -> str:
    """Return the text on one line, so that text from a file cannot begin a line that looks like kvtune's."""
    return printable(" ".join(text.splitlines()))


def print_json(value: object, indent: int = 0) -> None:
    """Print an object as JSON on stdout, on one line without `indent`. Its texts are masked before they are encoded."""
    import msgspec

    plain = masked_value(msgspec.to_builtins(value))
    try:
        text = msgspec.json.format(msgspec.json.encode(plain), indent=indent or -1).decode()
    except UnicodeEncodeError:  # half a character, of a server
        text = json.dumps(plain)
    stream = _behind(sys.stdout)
    stream.write(STEERING.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")
    stream.flush()


class _Screened:
    """A text stream that prints `printable` text. A rich Console writes its own colours to the underlying stream."""

    def __init__(self, stream: IO[str]) -> None:
        self.rich_proxied_file = stream  # rich's name for the underlying stream
        self._secrets = held()  # threads that print have no context

    def write(self, text: str) -> int:
        return self.rich_proxied_file.write(self._secrets.hide(printable(text)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def _behind(stream: IO[str]) -> IO[str]:
    while (behind := getattr(stream, "rich_proxied_file", None)) is not None:
        stream = behind
    return stream


@contextlib.contextmanager
def screened() -> Iterator[None]:
    """Apply `printable` to all text that the block prints on standard output and standard error."""
    out, err = (cast("IO[str]", _Screened(_behind(stream))) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def redraw(text: str) -> None:
    """Replace the current line of standard error, which must be a terminal."""
    stream = _behind(sys.stderr)
    stream.write(f"\r\x1b[K{one_line(text)}")
    stream.flush()


def console(piped: int | None = None, *, file: IO[str] | None = None, stderr: bool = False) -> Console:
    """Return the rich console to draw with. It reads no markup in text and makes all text `printable`.

    `piped`: the columns if the output is not a terminal.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Screen(Console):
        def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=printable(segment.text))

    stream = file or _behind(sys.stderr if stderr else sys.stdout)
    forced = None if file is None else False
    made = Screen(file=stream, force_terminal=forced, highlight=False, markup=False, emoji=False)
    if piped is not None and not made.is_terminal:
        made.width = piped
    return made


def width(piped: int) -> int:
    """Return the terminal's columns, or `piped` if standard output is not a terminal."""
    return shutil.get_terminal_size((piped, 24)).columns if sys.stdout.isatty() else piped


def folded(line: str, width: int) -> list[str]:
    """Fold a line longer than `width` between words, and indent its further lines like its last column.

    Columns are separated by two or more spaces. Text between backticks and words longer than the line stay whole.
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


def _folded_head(head: str, width: int) -> str:
    """Return a column's head in lines of at most `width`, where no piece of it is longer."""
    lines = [""]
    for piece in HEAD_PIECE.findall(head):
        if len((lines[-1] + piece).rstrip()) > width and lines[-1].strip():
            lines.append("")
        lines[-1] += piece if lines[-1] else piece.lstrip()
    return "\n".join(line.rstrip() for line in lines)


def command(text: str, style: str = "") -> Text:
    """Return a command that is never wrapped, even if longer than the terminal. Print it with `crop=False`."""
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ignore")


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column. `rank` 0: never dropped; of the others, the highest rank is dropped first if there is no room.

    `folds`: its text may be wrapped, but columns with a rank are dropped before it is narrower than `least`.
    """

    head: str
    right: bool = True
    folds: bool = False
    rank: int = 0
    least: int = 8


@dataclass(frozen=True, slots=True)
class FittedTable:
    """A table that rich draws as wide as the terminal allows. The first column's head is its title, in bold.

    `styles`: a style for each row's last cell.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    styles: Sequence[str] = ()
    gap: int = 3

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", [[one_line(cell) for cell in row] for row in self.rows])

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
        """Return the table as lines of plain text."""
        import io

        out = io.StringIO()
        console(width, file=out).print(self)
        return [line.rstrip() for line in out.getvalue().splitlines()]

    def _fitting(self, width: int) -> list[int] | None:
        """Return the numbers of the columns that fit, or None if the columns of rank 0 do not fit."""
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
        """Return the least width of this column at which no number is cut."""
        from rich.cells import cell_len

        column, cells = self.columns[number], self._cells(number)
        head = max((cell_len(piece.strip()) for piece in HEAD_PIECE.findall(column.head)), default=0)
        if column.folds:
            words = (cell_len(word) for row in self.rows for word in row[number].split())
            longest = min(max(words, default=0), LONGEST_WORD)
            cells = min(cells, max(longest, column.least))
        return max(min(head, LONGEST_HEAD), cells)

    def _widths(self, shown: Sequence[int], width: int) -> dict[int, int]:
        """Return each column's width: that of its longest cell or head, or less if the table would not fit."""
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
                Text(_folded_head(column.head, columns), style="" if number else "bold"),
                justify="right" if column.right and number else "left",
                overflow="fold",
                width=columns,
            )
        for nth, row in enumerate(self.rows):
            table.add_row(*(self._cell(nth, row, number) for number in shown))
        return table

    def _cell(self, nth: int, row: Sequence[str], number: int) -> Text:
        from rich.text import Text

        last = number == len(self.columns) - 1
        return Text(row[number], style=self.styles[nth] if self.styles and last else "")

    def _as_lines(self) -> RenderResult:
        from rich.text import Text

        heads = [column.head for column in self.columns]
        yield Text(heads[0], style="bold")
        for nth, row in enumerate(self.rows):
            yield Text(row[0])
            for number in range(1, len(heads)):
                yield Text(f"  {heads[number]} ", style="dim").append_text(self._cell(nth, row, number))
