"""Several runs beside a first one: what a comparison's page, text and JSON are drawn from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvtune.analysis.compare import Comparison, Figure, compare
from kvtune.run.types import Run


@dataclass(frozen=True, slots=True)
class Side:
    """One of the compared runs. `name` is short and differs from the others'."""

    name: str
    run: Run


@dataclass(frozen=True, slots=True)
class Contrast:
    """`comparisons[i]` sets `sides[i + 1]` against `sides[0]`."""

    sides: tuple[Side, ...]
    comparisons: tuple[Comparison, ...]
    differing: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def comparable(self) -> bool:
        return not any(c.mismatches for c in self.comparisons)


def contrast(runs: Sequence[Run], names: Sequence[str]) -> Contrast:
    """`names` are what the person called the runs (file names); short ones are made of what differs."""
    differing = _differing(runs)
    sides = tuple(Side(name, run) for name, run in zip(_short(runs, names, differing), runs, strict=True))
    return Contrast(sides, tuple(compare(runs[0], other) for other in runs[1:]), differing)


def sentence(comparison: Comparison) -> str:
    """The outcome in one sentence: what is better, what is worse, where nothing was shown."""
    better, worse = (_named(comparison.figures, verdict) for verdict in ("better", "worse"))
    if not better and not worse:
        return "no difference shown in any figure"
    parts = [f"better in {better}" if better else "", f"worse in {worse}" if worse else ""]
    return "; ".join(part for part in parts if part)


def _named(figures: Sequence[Figure], verdict: str) -> str:
    from kvtune.report.measures import change_text, measure_title

    found = [f for f in figures if f.verdict == verdict]
    first_of = {f.path.split(".")[0]: f for f in reversed(found)}  # one of the mean, the median and the p99
    named = [f for f in found if first_of[f.path.split(".")[0]] is f]
    more = f" and {len(found) - len(named)} more" if len(found) > len(named) else ""
    return ", ".join(f"{measure_title(f.path)} ({change_text(f)})" for f in named) + more


def _differing(runs: Sequence[Run]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """What may differ between compared runs, and does: the core, its settings, the engine's, the seed, the machine."""
    told = [_may_differ(run) for run in runs]
    names = list(dict.fromkeys(name for facts in told for name in facts))
    rows = [(name, tuple(facts.get(name, "–") for facts in told)) for name in names]
    return tuple(row for row in rows if len(set(row[1])) > 1)


def _may_differ(run: Run) -> dict[str, str]:
    h = run.header
    active = "" if h.core.name == "stock" or h.core.active else " (not active)"
    facts: dict[str, Any] = {"core": f"{h.core.name}{active}"}
    facts.update({f"core {name}": value for name, value in h.core.settings.items()})
    facts.update(
        {"blocks": h.engine.num_blocks, "block size": h.engine.block_size, "executor": h.engine.executor}
    )
    facts.update({f"engine {name}": value for name, value in h.engine.settings.items()})
    facts.update(
        {"probe": h.probe.level, "machine": f"{h.host.cpu}, {h.host.cores} cores", "kvtune": h.kvtune}
    )
    return {name: str(value) for name, value in facts.items()}


def _short(
    runs: Sequence[Run], names: Sequence[str], differing: Sequence[tuple[str, tuple[str, ...]]]
) -> list[str]:
    """The core's name where that tells the runs apart, else the names given, else both numbered."""
    cores = dict(differing).get("core")
    if cores is not None and len(set(cores)) == len(runs):
        return list(cores)
    if len(set(names)) == len(names):
        return list(names)
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]
