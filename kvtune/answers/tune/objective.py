"""Objectives: a figure of a run's summary, and whether larger or smaller is better. Pure.

Several may be named (`ttft,throughput`): the first ranks settings, and the others must not get worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvtune.answers.tune.result import Trial
from kvtune.base.errors import UsageError
from kvtune.reading.analysis.comparison.compare import Figure, value_at
from kvtune.reading.analysis.comparison.measures import is_timed
from kvtune.reading.analysis.figures import FIGURES
from kvtune.reading.analysis.figures import OBJECTIVES as PATHS


@dataclass(frozen=True, slots=True)
class Objective:
    """A figure to improve. `name` is a key of `kvtune.reading.analysis.figures.OBJECTIVES`.

    `simulated`: whether replays can measure the figure. `drift_path`: the figure that shows how far the machine drifted
    between stock's first and last run. `beside`: the other objectives, which must not get worse.
    """

    name: str
    simulated: bool = True
    drift_path: str = "ttft_ms.mean"
    beside: tuple[Objective, ...] = ()

    @property
    def path(self) -> str:
        return PATHS[self.name]

    @property
    def better(self) -> int:
        """1 if larger is better, -1 if smaller is."""
        return FIGURES[self.path].better

    @property
    def timed(self) -> bool:
        """Whether the figure is a time or a rate, which means little without an engine."""
        return is_timed(self.path)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(o.name for o in self.all)

    @property
    def all(self) -> tuple[Objective, ...]:
        return (self, *self.beside)

    @property
    def replayed(self) -> bool:
        """Whether replays can measure the figures of all objectives."""
        return all(each.simulated for each in self.all)

    def of(self, summary: Mapping[str, object]) -> float | None:
        return figure_at(summary, self.path)

    def among(self, figures: Iterable[Figure]) -> Figure | None:
        """Return the comparison of this figure, if it is among these."""
        return next((figure for figure in figures if figure.path == self.path), None)

    def measured(self, trials: Sequence[Trial]) -> list[tuple[Trial, float]]:
        """Return the complete trials that have the figure, each with it."""
        figures = [(t, self.of(t.summary)) for t in trials if t.state == "complete"]
        return [(t, figure) for t, figure in figures if figure is not None]

    def score(self, summary: Mapping[str, object]) -> float | None:
        """Return the figure as a score, larger is better; None if the run lacks the figure."""
        value = self.of(summary)
        return None if value is None else self.better * value


OBJECTIVES = {
    **{name: Objective(name) for name in PATHS},
    # From CPU time, which does not include waiting on a busy machine.
    "ceiling": Objective("ceiling", simulated=False, drift_path=PATHS["ceiling"]),
}


def figure_at(summary: Mapping[str, object], path: str) -> float | None:
    """Return the number at a path of a run's summary; None if the run has none."""
    try:
        return value_at(summary, path)
    except KeyError:
        return None


def objective(text: str, *, slo: Mapping[str, float] | None = None) -> Objective:
    """Read one objective, or several separated by commas. UsageError for goodput if `slo` is given but empty."""
    named = {each.name: each for each in (_read(part.strip() or text) for part in text.split(","))}
    if "goodput" in named and slo is not None and not slo:
        raise UsageError("goodput needs limits", "add --slo, e.g. --slo ttft=500,tpot=50")
    first, *others = named.values()
    return replace(first, beside=tuple(others))


def _read(name: str) -> Objective:
    if name not in OBJECTIVES:
        raise UsageError(
            f"there is no objective {name!r}",
            f"--objective takes {', '.join(OBJECTIVES)}, or several separated by commas",
        )
    return OBJECTIVES[name]


def refuse_unless_replayed(objective: Objective, flag: str, instead: str) -> None:
    """Raise UsageError for a flag that needs replays if replays cannot measure the objective."""
    if not objective.replayed:
        missing = next(each.name for each in objective.all if not each.simulated)
        raise UsageError(f"{flag} simulates, and a simulation has no {missing}", instead)


def refuse_times(objective: Objective, flag: str) -> None:
    """Raise UsageError for a flag that simulates at a nominal step cost if an objective is a time or a rate."""
    if timed := next((each.name for each in objective.all if each.timed), ""):
        raise UsageError(
            f"{flag} has no {timed}: its step cost is nominal, so only the order of events means anything",
            "name another objective, or run engines: sweep --on engine, tune without --on",
        )


def axes(objective: Objective) -> tuple[Objective, ...]:
    """Return the objectives of the Pareto front: the named ones if several, else TTFT, throughput and hit rate.

    Pages draw the first two.
    """
    return (
        objective.all
        if objective.beside
        else tuple(OBJECTIVES[n] for n in ("ttft", "throughput", "hit-rate"))
    )


def front(trials: Sequence[Trial], objective: Sequence[Objective]) -> list[Trial]:
    """Return the Pareto front of the complete trials, in order; of trials with equal figures, only the first."""
    every = [(t, tuple(o.score(t.summary) for o in objective)) for t in trials if t.state == "complete"]
    scored = [(t, scores) for t, scores in every if None not in scores]

    def beaten(number: int, mine: tuple[float | None, ...]) -> bool:
        return any(
            all((a or 0.0) >= (b or 0.0) for a, b in zip(theirs, mine, strict=True))
            and (theirs != mine or other.number < number)
            for other, theirs in scored
        )

    return [t for t, scores in scored if not beaten(t.number, scores)]
