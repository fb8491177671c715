"""An experiment: measures several sides in turns, so that a machine that slows down slows all of them.

In: the sides (a name and settings; the first is the baseline), how often each is run, and `measure`, which makes one
run of a side and returns when it is on disk. Out: each side's `runs` or `failed`, and why the experiment ended early.
Knows nothing of engines. Imported by: cli (`profile --repeat`), tune (confirmation, `recipe verify`) and
`make evidence`.

order     A B C, C B A, B C A, A C B, ..: every second round reverses the round before it, and each pair of rounds
          starts with another side
journal   `kept` returns runs that an earlier call made, so that the same command resumes
budget    after the first `least` rounds, a run starts only if it would end within `budget_s` (by the mean run so far),
          and a round only if `enough()` is false
failure   KvtuneError from `measure`: the side is not run again; if the baseline fails, the experiment ends
Ctrl-C    ends the experiment; the runs made so far stay
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any, Generic, TypeVar

from kvtune.base.errors import EXIT_INTERRUPTED, KvtuneError
from kvtune.base.legal import Value

R = TypeVar("R")

BASELINE = "baseline"
INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Side(Generic[R]):
    """One side: its settings, and its runs in the order made. `failed`: why it is not run again."""

    name: str
    settings: dict[str, Value]
    runs: list[R] = field(default_factory=list)
    failed: str = ""


S = TypeVar("S", bound=Side[Any])


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
    least: int = 0,
    budget_s: float = inf,
    enough: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = monotonic,
) -> Ended:
    """Run the sides until each has `repeats` runs, including those of earlier calls."""
    took, began = list[float](), clock()
    for number, (repeat, index) in enumerate(order(len(sides), repeats)):
        side = sides[index]
        if number % len(sides) == 0 and repeat >= least and enough():
            break
        if side.failed or len(side.runs) > repeat:
            continue
        run = kept(side)
        if run is None:
            mean = sum(took) / len(took) if took else 0.0
            if repeat >= least and clock() - began + mean > budget_s:
                return Ended(f"the budget of {budget_s / 60:g} min is used up")
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
