"""An experiment: sides, each measured several times in turns, so that a machine that slows down slows all of them.

In: the sides (a name and settings; the first is the baseline), how often each is run, and `measure`, which makes one
run of a side and returns when it is on disk. Out: each side's `runs` or `failed`, and what ended the experiment early.
Knows nothing of engines. Imported by: cli (`profile --repeat`, `--ablate`), tune (confirmation, `recipe verify`) and
`make evidence`.

order     A B C, C B A, B C A, A C B, ..: every second round reverses the one before, each pair begins with another side
journal   `kept` has what an earlier call measured, so the same command resumes; `RunFiles` is such a journal
budget    after the first `least` rounds, no run begins that would end after `budget_s`, judged by the mean run so far,
          and no round if it is `enough()`
failure   KvtuneError from `measure`: the side is not run again; without its baseline the experiment ends
Ctrl-C    ends the experiment; the runs that were made stay
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Generic, TypeVar

from kvtune.errors import EXIT_INTERRUPTED, KvtuneError, UsageError
from kvtune.legal import Value

R = TypeVar("R")

BASELINE = "baseline"
INTERRUPTED = "interrupted"
FIELDS = ("variant", "repeat", "file", "seconds")
"""Fields of a line of `RunFiles`: the side's name, the run's number in it, the run file's name, its seconds."""


@dataclass(slots=True)
class Side(Generic[R]):
    """A setting and its runs, in the order in which they were made. `failed`: why it is not run again."""

    name: str
    settings: dict[str, Value]
    runs: list[R] = field(default_factory=list)
    failed: str = ""


S = TypeVar("S", bound=Side[Any])


@dataclass(frozen=True, slots=True)
class Progress:
    """Before each run: its number and the total; the mean seconds of a run so far, and the seconds left for all."""

    name: str
    number: int
    total: int
    run_s: float | None
    left_s: float | None


@dataclass(frozen=True, slots=True)
class Ended:
    """`why` is "" if all runs were made, or enough of them. `error`: the baseline's error, or Ctrl-C's."""

    why: str = ""
    error: KvtuneError | KeyboardInterrupt | None = None


def order(count: int, repeats: int) -> Iterator[tuple[int, int]]:
    """(round, side): every second round reverses the one before; each pair of rounds starts with another side."""
    for repeat in range(repeats):
        row = [(i + repeat // 2) % count for i in range(count)]
        for side in reversed(row) if repeat % 2 else row:
            yield repeat, side


def experiment(
    sides: Sequence[S],
    repeats: int,
    measure: Callable[[S], R],
    *,
    kept: Callable[[S], R | None] = lambda side: None,
    seconds: Iterable[float] = (),
    least: int = 0,
    budget_s: float = inf,
    enough: Callable[[], bool] = lambda: False,
    before: Callable[[Progress], None] = lambda progress: None,
    clock: Callable[[], float] = monotonic,
) -> Ended:
    """Run the sides until each has `repeats` runs, earlier ones included. `seconds`: how long earlier runs took."""
    took, began, total = list(seconds), clock(), repeats * len(sides)
    for number, (repeat, at) in enumerate(order(len(sides), repeats), start=1):
        side = sides[at]
        if (number - 1) % len(sides) == 0 and repeat >= least and enough():
            break
        if side.failed or len(side.runs) > repeat:
            continue
        run = kept(side)
        if run is None:
            mean = sum(took) / len(took) if took else None
            if repeat >= least and clock() - began + (mean or 0.0) > budget_s:
                return Ended(f"the budget of {budget_s / 60:g} min is used up")
            left = mean * (total - number + 1) if mean is not None else None
            before(Progress(side.name, number, total, mean, left))
            start = clock()
            try:
                run = measure(side)
            except KeyboardInterrupt as error:
                return Ended(INTERRUPTED, error)
            except KvtuneError as error:
                if error.exit_code == EXIT_INTERRUPTED:
                    return Ended(INTERRUPTED, error)
                side.failed = error.message
                if side is sides[0]:
                    return Ended(f"the baseline failed: {error.message}", error)
                continue
            took.append(clock() - start)
        side.runs.append(run)
    return Ended()


class RunFiles:
    """A journal of run files that lie beside it, one JSON object a line. `make` makes a run file of a side.

    UsageError if the file does not begin like such a line: it is not kvtune's, and nothing is added to it. A run whose
    line a crash cut off is made again.
    """

    def __init__(self, path: Path, make: Callable[[Any], Path]) -> None:
        self.path, self._make = path, make
        self._rows = [row for row in _rows(path) if self._file(row["file"]).is_file()]
        self.seconds = [float(row["seconds"]) for row in self._rows]

    def held(self, side: Side[Path]) -> int:
        """Number of this side's runs that earlier calls made."""
        return sum(row["variant"] == side.name for row in self._rows)

    def kept(self, side: Side[Path]) -> Path | None:
        """The next run of this side that an earlier call made."""
        files = [row["file"] for row in self._rows if row["variant"] == side.name]
        return self._file(files[len(side.runs)]) if len(files) > len(side.runs) else None

    def measure(self, side: Side[Path]) -> Path:
        """Make a run, and add its line after any incomplete one."""
        began = monotonic()
        file = self._make(side)
        values = (side.name, len(side.runs), file.name, round(monotonic() - began, 1))
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self.path, flags, 0o666), "r+b") as journal:
            length = journal.seek(0, os.SEEK_END)
            torn = length and os.pread(journal.fileno(), 1, length - 1) != b"\n"
            line = json.dumps(dict(zip(FIELDS, values, strict=True))).encode()
            journal.write(b"\n" * bool(torn) + line + b"\n")
        return file

    def end(self) -> None:
        """Remove the journal: the next experiment starts from the beginning. The run files stay."""
        _rows(self.path)
        self.path.unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self.path.with_name(name)


def _rows(path: Path) -> list[dict[str, Any]]:
    if not os.path.lexists(path):
        return []
    start = f'{{"{FIELDS[0]}"'
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "no file"
    if path.is_symlink() or not text.startswith(start[: len(text)]):
        raise UsageError(
            f"{path} is not a journal that kvtune wrote", "move it away, or choose another folder with -o"
        )
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and set(FIELDS) <= row.keys() and Path(row["file"]).name == row["file"]:
            rows.append(row)
    return rows
