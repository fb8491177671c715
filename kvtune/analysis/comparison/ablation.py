"""What each switch is worth: runs with one switch flipped against the baseline, with intervals over repeats. Pure.

`kvtune profile --ablate` stores `as_result` in `header.extra.ablation` of the baseline's first run; `stored` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
"""Figures of the whole engine (every process); for each, less is better.

`ceiling_us_per_token`: CPU time per token of the process that sets the ceiling: 20 µs for 50,000 tokens a second.
"""

Figures = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class AblationSide:
    """A variant: the baseline with one setting turned `off` or `on` (`turned` is "" for the baseline itself).

    `runs` has the FIGURES of each completed run, `files` their names in the folder of the baseline's run, `failed` why
    others failed. `worths` compares each of FIGURES with the baseline's; the baseline has none.
    """

    name: str
    turned: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    runs: tuple[Figures, ...] = ()
    files: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    worths: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True)
class Ablation:
    """`done` of `planned` runs were made. `why` says what ended it early, "" when nothing did."""

    planned: int
    done: int
    repeats: int
    why: str
    baseline: AblationSide
    turned: tuple[AblationSide, ...]


def figures(run: Run) -> dict[str, float | None]:
    """One number for each of FIGURES; None where the run did not record it."""
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


def as_result(sides: Sequence[AblationSide], *, planned: int, repeats: int, why: str) -> AblationResult:
    """The form that a run file stores: what was run and its figures. The verdicts are computed when it is read."""
    variants = [
        AblationVariant(
            name=side.name,
            turned=side.turned,
            settings=dict(side.settings),
            runs=[dict(run) for run in side.runs],
            files=list(side.files),
            failed=list(side.failed),
        )
        for side in sides
    ]
    return AblationResult(planned=planned, repeats=repeats, why=why, sides=variants)


def stored(run: Run) -> Ablation | None:
    """The ablation that this run is the baseline of; None if there is none, or the stored one has no baseline."""
    result = run.header.extra.ablation
    return read(result) if result is not None and any(not side.turned for side in result.sides) else None


def read(result: AblationResult) -> Ablation:
    """The stored runs with their verdicts. StopIteration without a baseline."""
    sides = [_side(variant) for variant in result.sides]
    base = next(side for side in sides if not side.turned)
    turned = tuple(replace(side, worths=worths(base.runs, side.runs)) for side in sides if side.turned)
    done = sum(len(side.runs) + len(side.failed) for side in sides)
    return Ablation(result.planned, done, result.repeats, result.why, base, turned)


def worths(baseline: Sequence[Figures], turned: Sequence[Figures]) -> tuple[Figure, ...]:
    """One for each of FIGURES."""

    def values(runs: Sequence[Figures], name: str) -> list[float]:
        return [value for run in runs if (value := run[name]) is not None]

    return tuple(
        repeated(Measure(name, -1), values(baseline, name), values(turned, name)) for name in FIGURES
    )


def _side(variant: AblationVariant) -> AblationSide:
    return AblationSide(
        name=variant.name,
        turned=variant.turned,
        settings=variant.settings,
        runs=tuple({name: run.get(name) for name in FIGURES} for run in variant.runs),
        files=tuple(variant.files),
        failed=tuple(variant.failed),
    )
