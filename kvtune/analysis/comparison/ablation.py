"""The effect of each switch: runs with one switch flipped against the baseline, with intervals over repeats. Pure.

`kvtune profile --ablate` stores the runs' `figures` in `header.extra.ablation` of the baseline's first run; `stored`
reads them and computes the verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from kvtune.analysis.comparison.compare import Figure
from kvtune.analysis.comparison.measures import Measure
from kvtune.analysis.comparison.repeats import repeated
from kvtune.analysis.gc import collectors
from kvtune.analysis.host.cost import host_cost
from kvtune.analysis.memory import memory
from kvtune.analysis.run import RunAnalysis
from kvtune.run.extras import AblationResult, AblationVariant
from kvtune.run.types import Run

FIGURES = (
    "collections",
    "pause_ms",
    "step_ms",
    "host_us_per_request_step",
    "ceiling_us_per_token",
    "rss_growth_bytes_s",
)
"""Figures of the whole engine (every process), as in `kvtune.analysis.figures`. For each, less is better."""

Figures = Mapping[str, float | None]


class AblationSide(AblationVariant, frozen=True, kw_only=True):
    """A variant. `worths`: each of FIGURES compared with the baseline's; empty for the baseline."""

    worths: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True)
class Ablation:
    """`done` of `planned` runs were made. `why`: the reason if it ended early, else ""."""

    planned: int
    done: int
    repeats: int
    why: str
    baseline: AblationSide
    turned: tuple[AblationSide, ...]


def figures(run: Run) -> dict[str, float | None]:
    """Return one number for each of FIGURES; None if the run did not record it."""
    by_process = collectors(run).values()
    host, most = host_cost(run), RunAnalysis(run).ceiling
    slopes = [m.slope_bytes_s for m in memory(run).values() if m.slope_bytes_s is not None]
    return {
        "collections": float(sum(sum(c.collections) for c in by_process)),
        "pause_ms": sum(c.pause_total_ms for c in by_process),
        "step_ms": host.step_ms.mean,
        "host_us_per_request_step": host.per_request_step_us,
        "ceiling_us_per_token": 1e6 / most.tokens_s if most is not None else None,
        "rss_growth_bytes_s": float(sum(slopes)) if slopes else None,
    }


def stored(run: Run) -> Ablation | None:
    """Return the ablation that is stored with this run, its baseline; None if there is none, or it has no baseline."""
    result = run.header.extra.ablation
    return read(result) if result is not None and any(not side.turned for side in result.sides) else None


def read(result: AblationResult) -> Ablation:
    """Return the stored runs with their verdicts. StopIteration without a baseline."""
    base = next(side for side in result.sides if not side.turned)
    sides = [
        AblationSide(**structs.asdict(side), worths=worths(base.runs, side.runs) if side.turned else ())
        for side in result.sides
    ]
    done = sum(len(side.runs) + len(side.failed) for side in sides)
    first = next(side for side in sides if not side.turned)
    turned = tuple(side for side in sides if side.turned)
    return Ablation(result.planned, done, result.repeats, result.why, first, turned)


def worths(baseline: Sequence[Figures], turned: Sequence[Figures]) -> tuple[Figure, ...]:
    """Compare each of FIGURES with the baseline's."""

    def values(runs: Sequence[Figures], name: str) -> list[float]:
        return [value for run in runs if (value := run.get(name)) is not None]

    return tuple(repeated(Measure(name), values(baseline, name), values(turned, name)) for name in FIGURES)
