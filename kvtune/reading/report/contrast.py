"""Compares runs with the first one: the data of a comparison's page, text and JSON. Pure.

If every setting was run at least twice (A B A B), runs with equal settings are repetitions of one side. Each run is
then one observation, so that intervals include the machine's drift. Otherwise each run is a side by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtune.base.commands import in_turns
from kvtune.base.units import ms, number, percent
from kvtune.data.knobs import CORE
from kvtune.data.run.types import Run
from kvtune.data.show.parts import Grid, grid
from kvtune.data.show.terminal import Column
from kvtune.reading.analysis.again import left_out, profile_again
from kvtune.reading.analysis.comparison.compare import (
    ONE_RUN,
    OTHER_TRAFFIC,
    Comparison,
    Figure,
    compare,
    compare_repeats,
    predicted,
)
from kvtune.reading.analysis.figures import quantity
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.spread import Values
from kvtune.reading.analysis.stalls.account import SideStalls, side_stalls
from kvtune.reading.analysis.stalls.delays import CAUSES, LEAST_SHARE
from kvtune.reading.analysis.summary import Summary, summary
from kvtune.reading.report.figures import change_text
from kvtune.requests.types import Workload

Facts = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True, slots=True)
class RunGroup:
    """One side of a comparison: one or more runs of equal settings. No other side has the same `name`."""

    name: str
    analyses: tuple[RunAnalysis, ...]
    summaries: tuple[Summary, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(analysis.run for analysis in self.analyses)

    @property
    def run(self) -> Run:
        """The side's first run. All its runs have the same settings."""
        return self.analyses[0].run

    def values(self, observe: Any) -> Values:
        """Return the values of `observe(run)` for all runs of this side, concatenated."""
        return np.concatenate([np.asarray(observe(run), dtype=np.float64) for run in self.runs])


@dataclass(frozen=True, slots=True)
class Contrast:
    """A comparison. `comparisons[i]`: `sides[i + 1]` against `sides[0]`. `differing`: settings, a value per side."""

    sides: tuple[RunGroup, ...]
    comparisons: tuple[Comparison, ...]
    differing: Facts

    @property
    def others(self) -> list[tuple[RunGroup, Comparison]]:
        """The sides after the first, each with its comparison."""
        return list(zip(self.sides[1:], self.comparisons, strict=True))

    @property
    def differences(self) -> list[str]:
        """The checked fields that differ from the first side's, with both values: `vllm differs: 0.32.0 in a, ..`."""
        first = self.sides[0].name
        return [
            f"{miss.field} differs: {miss.a} in {first}, {miss.b} in {side.name}"
            for side, comparison in self.others
            for miss in comparison.mismatches
        ]

    @property
    def repeated(self) -> bool:
        return len(self.sides[0].runs) > 1

    @property
    def times_judged(self) -> bool:
        return self.repeated or predicted(*(side.run for side in self.sides))

    @property
    def repeat_command(self) -> str:
        """A command that runs the sides in turns, so that times can be judged; "" if it is not needed or not known."""
        return self.repeated_with()

    def repeated_with(self, *options: str) -> str:
        """Return `repeat_command` with these options of `compare`."""
        told_apart = len({profile_again(side.run, "") for side in self.sides}) == len(self.sides)
        # One folder per side: `compare` then takes the sides in this order, and compares with the first.
        folders = [f"ab/{number}" for number in range(1, len(self.sides) + 1)]
        commands = [profile_again(side.run, folder) for side, folder in zip(self.sides, folders, strict=True)]
        if self.times_judged or not told_apart or not all(commands):
            return ""
        return in_turns(commands, folders, *options)

    @property
    def left_out(self) -> str:
        """The flags of the sides' files that `repeat_command` leaves out, in a sentence; "" if there are none."""
        return left_out([word for side in self.sides for word in side.run.header.engine.args])


def contrast(runs: Sequence[Run], names: Sequence[str], workload: Workload | None = None) -> Contrast:
    """Compare runs with the first one. `names`: a name for each run, such as its file's.

    `workload` is only used to classify misses in the summaries; no compared figure needs it.
    """
    groups = _groups(runs, names)
    differing = _differing([group[0][1] for group in groups])
    titles = _short([group[0][0] for group in groups], differing)
    sides = tuple(
        _side(title, [run for _, run in group], workload) for title, group in zip(titles, groups, strict=True)
    )
    return Contrast(sides, tuple(_against(sides[0], side) for side in sides[1:]), differing)


def _side(name: str, runs: Sequence[Run], workload: Workload | None) -> RunGroup:
    analyses = tuple(RunAnalysis(run, workload) for run in runs)
    return RunGroup(name, analyses, tuple(summary(analysis) for analysis in analyses))


def _against(first: RunGroup, other: RunGroup) -> Comparison:
    if len(first.runs) > 1:
        return compare_repeats(first.runs, other.runs, (first.summaries, other.summaries))
    return compare(first.run, other.run, summaries=(first.summaries[0], other.summaries[0]))


NO_DIFFERENCE = "no difference shown in any figure that is judged"


def sentence(comparison: Comparison) -> str:
    """Return the outcome in one sentence: what is better, what is worse, or that no difference was shown."""
    if any(f.why == OTHER_TRAFFIC for f in comparison.figures):
        return "figures not judged, as the traffic differs"
    named = [(verdict, _named(comparison.figures, verdict)) for verdict in ("better", "worse")]
    parts = [f"{verdict} in {names}" for verdict, names in named if names]
    if any(f.why == ONE_RUN for f in comparison.figures):
        parts = [*(parts or [NO_DIFFERENCE]), "times not judged (one run a side)"]
    return "; ".join(parts or [NO_DIFFERENCE])


def _named(figures: Sequence[Figure], verdict: str) -> str:
    alike = [f for f in figures if f.verdict == verdict]
    # Only the first of a time's mean, median and p99.
    first_of = {f.path.split(".")[0]: f for f in reversed(alike)}
    named = [f"{quantity(f.path).title} ({change_text(f)})" for f in alike if f in first_of.values()]
    more = f" and {len(alike) - len(named)} more" if len(alike) > len(named) else ""
    return ", ".join(named) + more


def _groups(runs: Sequence[Run], names: Sequence[str]) -> list[list[tuple[str, Run]]]:
    groups: dict[tuple[tuple[str, str], ...], list[tuple[str, Run]]] = {}
    for name, run in zip(names, runs, strict=True):
        groups.setdefault(tuple(sorted(_may_differ(run).items())), []).append((name, run))
    repeated = list(groups.values())
    if len(repeated) > 1 and all(len(group) > 1 for group in repeated):
        return repeated
    return [[pair] for pair in zip(names, runs, strict=True)]


FOLLOWS_FROM_CORE = ("scheduler", "pool", "tiers")


def _differing(runs: Sequence[Run]) -> Facts:
    """Return the allowed differences between runs: core and engine settings, probe, machine, versions."""
    per_run = [_may_differ(run) for run in runs]
    names = list(dict.fromkeys(name for facts in per_run for name in facts))
    rows = [(name, tuple(facts.get(name, "–") for facts in per_run)) for name in names]
    return tuple(row for row in rows if len(set(row[1])) > 1)


def _may_differ(run: Run) -> dict[str, str]:
    h = run.header
    active = "" if h.core.name == "stock" or h.core.active else " (not active)"
    facts: dict[str, object] = {"core": f"{h.core.name}{active}"}
    facts.update(
        {f"core {k}": v for k, v in h.core.settings.items() if k not in CORE or CORE[k].default != v}
    )
    facts.update({"blocks": h.engine.pool, "block size": h.engine.block_size, "executor": h.engine.executor})
    settings = {k: v for k, v in h.engine.settings.items() if k not in FOLLOWS_FROM_CORE}
    facts.update({f"engine {name}": value for name, value in settings.items()})
    facts.update(
        {"probe": h.probe.level, "machine": f"{h.host.cpu}, {h.host.cores} cores", "kvtune": h.kvtune}
    )
    facts["vllm"] = h.engine.vllm
    return {name: str(value) for name, value in facts.items()}


def _short(names: Sequence[str], differing: Facts) -> list[str]:
    """Return the sides' names: their cores if all differ, else the given names, numbered if these are not unique."""
    cores = dict(differing).get("core")
    if cores is not None and len(set(cores)) == len(names):
        return list(cores)
    if len(set(names)) == len(names):
        return list(names)
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


NO_GAPS = (0.0, 0.0)


def slow_tokens(sides: Sequence[RunGroup]) -> Grid | None:
    """Return each side's slow tokens by cause, as the mean of its runs; None if no side has a slow token."""
    stalls = [side_stalls([analysis.stalls for analysis in side.analyses]) for side in sides]
    measured = [side for side in stalls if side is not None]
    if not any(side.slow for side in measured):
        return None
    parts = {cause: [side.causes.get(cause, NO_GAPS)[1] for side in measured] for cause in CAUSES}
    causes = [
        cause
        for cause, parts_ms in sorted(parts.items(), key=lambda part: -max(part[1]))
        if any(
            part and part / side.excess_ms >= LEAST_SHARE
            for part, side in zip(parts_ms, measured, strict=True)
        )
    ]
    titles = ("a gap is slow over", "all slow gaps", *(CAUSES[cause] for cause in causes))
    columns = [
        Column("largest cause of slow tokens", folds=True, least=22),
        *(Column(side.name, right=False, folds=True) for side in sides),
    ]
    rows = zip(titles, *(_slow(side, causes) for side in stalls), strict=True)
    return grid(columns, rows, "Slow gaps by cause")


def _slow(side: SideStalls | None, causes: Sequence[str]) -> list[str]:
    """Return a side's column: its limit, and of all slow gaps and of each cause `12 gaps, 840 ms (34.5 %)`."""
    if side is None:
        return ["–"] * (2 + len(causes))
    parts = [(side.slow, side.excess_ms), *(side.causes.get(cause, NO_GAPS) for cause in causes)]
    shares = (
        f"{number(gaps)} {'gap' if gaps == 1 else 'gaps'}, {ms(part_ms)} ({percent(part_ms, side.excess_ms)})"
        for gaps, part_ms in parts
    )
    return [ms(side.limit_ms), *shares]
