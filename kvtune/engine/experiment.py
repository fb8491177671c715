"""An experiment: measures several sides in turns, so that a machine that slows down slows all of them.

In: the sides (a name and settings; the first is the baseline), how often each is run, and `measure`, which makes one
run of a side and returns when it is on disk. Out: each side's `runs` or `failed`, and why the experiment ended early.
Knows nothing of engines. Imported by: cli (`profile --repeat`, `--ablate`), tune (confirmation, `recipe verify`) and
`make evidence`.

order     A B C, C B A, B C A, A C B, ..: every second round reverses the round before it, and each pair of rounds
          starts with another side
journal   `kept` returns runs that an earlier call made, so that the same command resumes; `RunFiles` is such a journal
budget    after the first `least` rounds, a run starts only if it would end within `budget_s` (by the mean run so far),
          and a round only if `enough()` is false
failure   KvtuneError from `measure`: the side is not run again; if the baseline fails, the experiment ends
Ctrl-C    ends the experiment; the runs made so far stay
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

from kvtune.bounded import decode_json
from kvtune.errors import EXIT_INTERRUPTED, KvtuneError, UsageError
from kvtune.files import appending
from kvtune.legal import Value

R = TypeVar("R")

BASELINE = "baseline"
INTERRUPTED = "interrupted"
FIELDS = ("variant", "repeat", "file", "seconds")
"""Fields of a line of `RunFiles`: name of the side, number of its run (from 0), name of the run file, seconds taken."""


@dataclass(slots=True)
class Side(Generic[R]):
    """One side: its settings, and its runs in the order made. `failed`: why it is not run again."""

    name: str
    settings: dict[str, Value]
    runs: list[R] = field(default_factory=list)
    failed: str = ""


S = TypeVar("S", bound=Side[Any])


@dataclass(frozen=True, slots=True)
class Progress:
    """Reported before each run: its number of `total`, the mean seconds of a run so far, the seconds left for all."""

    name: str
    number: int
    total: int
    run_s: float | None
    left_s: float | None


@dataclass(frozen=True, slots=True)
class Ended:
    """Why an experiment ended. `why` is "" if all runs were made, or if `enough()` ended it.

    `error`: the baseline's error, or Ctrl-C's.
    """

    why: str = ""
    error: KvtuneError | KeyboardInterrupt | None = None


def order(count: int, repeats: int) -> Iterator[tuple[int, int]]:
    """Yield (round, side): every second round reverses the round before it; each pair starts with another side."""
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
    """Run the sides until each has `repeats` runs, including those of earlier calls, which took `seconds`."""
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
    """A journal of run files in the same folder, one JSON object per line. `make` makes a run file of a side.

    UsageError if the file does not begin like a journal: kvtune did not write it, and does not change it. If a crash
    cut a line off, its run is made again.
    """

    def __init__(self, path: Path, make: Callable[[Any], Path]) -> None:
        self.path, self._make = path, make
        self._rows = [row for row in _rows(path) if self._file(row["file"]).is_file()]
        self.seconds = [float(row["seconds"]) for row in self._rows]

    def held(self, side: Side[Path]) -> int:
        """Return how many of this side's runs earlier calls made."""
        return sum(row["variant"] == side.name for row in self._rows)

    def kept(self, side: Side[Path]) -> Path | None:
        """Return the next run of this side that an earlier call made; None if there is none."""
        files = [row["file"] for row in self._rows if row["variant"] == side.name]
        return self._file(files[len(side.runs)]) if len(files) > len(side.runs) else None

    def measure(self, side: Side[Path]) -> Path:
        """Make a run and append its line to the journal, also after a line that was cut off."""
        began = monotonic()
        file = self._make(side)
        values = (side.name, len(side.runs), file.name, round(monotonic() - began, 1))
        with appending(self.path) as journal:
            length = journal.seek(0, os.SEEK_END)
            torn = length and os.pread(journal.fileno(), 1, length - 1) != b"\n"
            line = json.dumps(dict(zip(FIELDS, values, strict=True))).encode()
            journal.write(b"\n" * bool(torn) + line + b"\n")
        return file

    def end(self) -> None:
        """Remove the journal, so that the next experiment starts from the beginning. The run files stay."""
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
            row = decode_json(line)
        except ValueError:
            continue
        if isinstance(row, dict) and set(FIELDS) <= row.keys() and Path(row["file"]).name == row["file"]:
            rows.append(row)
    return rows
