"""What a setting is judged by: one figure of a run's summary, and whether more or less of it is better. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtune.analysis.compare import value_at
from kvtune.errors import UsageError
from kvtune.tune.trial import Trial


@dataclass(frozen=True, slots=True)
class Objective:
    """`better` is 1 where more is better, -1 where less is. `timed` figures mean little without an engine."""

    name: str
    path: str
    better: int
    timed: bool

    def of(self, summary: Mapping[str, Any]) -> float | None:
        try:
            return value_at(summary, self.path)
        except KeyError:
            return None

    def score(self, summary: Mapping[str, Any]) -> float | None:
        """Larger is better; None where the run has no such figure."""
        value = self.of(summary)
        return None if value is None else self.better * value


OBJECTIVES = {
    o.name: o
    for o in (
        Objective("hit-rate", "prefix_cache.hit_rate", 1, timed=False),
        Objective("ttft", "ttft_ms.mean", -1, timed=True),
        Objective("throughput", "throughput_tok_s", 1, timed=True),
    )
}


def objective(name: str) -> Objective:
    found = OBJECTIVES.get(name)
    if found is None:
        raise UsageError(f"--objective {name} is not known", f"--objective takes {', '.join(OBJECTIVES)}")
    return found


def best(trials: Sequence[Trial], by: Objective) -> Trial | None:
    """The complete trial with the best figure; of equal ones (hits, then first-token time) the first."""
    ttft = OBJECTIVES["ttft"]
    scored = [
        (score, ttft.score(t.summary) or float("-inf"), -t.number, t)
        for t in trials
        if t.state == "complete" and (score := by.score(t.summary)) is not None
    ]
    return max(scored, key=lambda row: row[:3])[3] if scored else None


def front(trials: Sequence[Trial], by: Sequence[Objective] = tuple(OBJECTIVES.values())) -> list[Trial]:
    """The complete trials that no other one beats in one figure without losing in another (Pareto), in order."""
    told = [
        (t, tuple(scores))
        for t in trials
        if t.state == "complete" and None not in (scores := [o.score(t.summary) for o in by])
    ]

    def beaten(mine: tuple[float | None, ...]) -> bool:
        return any(
            theirs != mine and all((a or 0.0) >= (b or 0.0) for a, b in zip(theirs, mine, strict=True))
            for _, theirs in told
        )

    return [t for t, scores in told if not beaten(scores)]
