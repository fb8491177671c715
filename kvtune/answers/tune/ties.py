"""Chooses one of several trials with equal figures. Pure.

Criteria in this order: fewest values changed from the defaults; least host memory; fewest knobs; best mean figure of
the neighbours (trials that differ in one knob); lowest number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtune.answers.tune.objective import OBJECTIVES, Objective, front
from kvtune.answers.tune.result import Trial
from kvtune.data.knobs import CORE
from kvtune.data.recipe import Scalar
from kvtune.reading.analysis.offload import tier_gib

EXACT = 1e-6
"""Figures count as equal if their relative difference is at most this."""
TTFT_SHARE = 0.01
"""Predicted first-token times count as equal up to this relative difference; measured ones are not compared."""


def best(trials: Sequence[Trial], objective: Objective) -> Trial | None:
    """Return the complete trial with the best figure, or None. The baseline in `trials` shows the engine's defaults."""
    ttft = OBJECTIVES["ttft"]

    def rank(t: Trial) -> tuple[float, float]:
        predicted = ttft.score(t.summary) if t.on == "sim" else None
        return objective.score(t.summary) or 0.0, float("-inf") if predicted is None else predicted

    leader = max(_tried(trials, objective), key=rank, default=None)
    return None if leader is None else among_equals(leader, trials, objective)


def finalists(trials: Sequence[Trial], objective: Objective, most: int) -> list[Trial]:
    """Return at most `most` of the best trials, all with different figures; of equal ones, the one to choose."""
    ttft = OBJECTIVES["ttft"]
    ranked = _tried(trials, objective)
    ranked.sort(
        key=lambda t: (-(objective.score(t.summary) or 0.0), -(ttft.score(t.summary) or 0.0), t.number)
    )
    if objective.beside:
        # With several objectives: the best trial in each, then the rest of the Pareto front.
        ahead = front(ranked, objective.all)
        leaders = [max(ahead, key=lambda t: o.score(t.summary) or 0.0) for o in objective.all if ahead]
        ranked = [*leaders, *ahead]
    chosen: list[Trial] = []
    for t in ranked:
        if len(chosen) < most and not any(equal(t, other, objective) for other in chosen):
            chosen.append(among_equals(t, trials, objective))
    return chosen


def among_equals(leader: Trial, trials: Sequence[Trial], objective: Objective) -> Trial:
    """Return the trial to choose among those with the leader's figures."""
    tried = [t for t in _tried(trials, objective) if t.on == leader.on]
    defaults = _engine_defaults(trials)

    def cost(t: Trial) -> tuple[float, ...]:
        changed, beside = _changed(t, defaults), _neighbours(t, tried, objective)
        return changed, tier_gib(t.summary), len(t.settings), -beside, t.number

    return min(tied(leader, tried, objective), key=cost)


def tied(leader: Trial, tried: Sequence[Trial], objective: Objective) -> list[Trial]:
    """Return the trials with the leader's figures, itself among them."""
    return [t for t in tried if t.number == leader.number or equal(t, leader, objective)]


def equal(first: Trial, other: Trial, objective: Objective) -> bool:
    """Whether two trials have the same figures in every objective, and about the same predicted first-token time."""
    pairs = _pairs(first, other, objective, predicted=first.on == "sim")
    return all(a == b or (a is not None and b is not None and _near(a, b, share)) for a, b, share in pairs)


def no_worse(first: Trial, other: Trial, objective: Objective) -> bool:
    """Whether `first` is complete, uses no more host memory than `other`, and is as good in TTFT and all objectives."""
    if tier_gib(first.summary) > tier_gib(other.summary):
        return False
    figures = _pairs(first, other, objective, predicted=True)
    return first.state == "complete" and all(
        b is None or (a is not None and (a >= b or _near(a, b, share))) for a, b, share in figures
    )


def _pairs(
    first: Trial, other: Trial, objective: Objective, *, predicted: bool
) -> list[tuple[float | None, float | None, float]]:
    """Return both trials' score in each figure, and how far equal ones may differ. `predicted`: also in TTFT."""
    figures = [(each, EXACT) for each in objective.all] + [(OBJECTIVES["ttft"], TTFT_SHARE)] * predicted
    return [(each.score(first.summary), each.score(other.summary), share) for each, share in figures]


def is_default(name: str, value: Scalar) -> bool:
    """Whether `value` is the default of a core knob (False for vLLM's settings)."""
    return name in CORE and CORE[name].default == value


def _tried(trials: Sequence[Trial], objective: Objective) -> list[Trial]:
    """Return the complete trials of settings that have the figure."""
    return [t for t, _ in objective.measured(trials) if t.role == "trial"]


def _near(a: float, b: float, share: float) -> bool:
    return abs(a - b) <= share * max(abs(a), abs(b))


def _changed(t: Trial, defaults: Mapping[str, Scalar]) -> int:
    return sum(
        not is_default(name, value) and defaults.get(name) != value for name, value in t.settings.items()
    )


def _engine_defaults(trials: Sequence[Trial]) -> dict[str, Scalar]:
    """Return vLLM's default values, as the baseline's run reports them."""
    baseline = next((t for t in trials if t.role == "baseline" and t.state == "complete"), None)
    engine = baseline.summary.get("engine", {}) if baseline is not None else {}
    values = {**engine.get("settings", {}), "block_size": engine.get("block_size")}
    return {name: "none" if value is None else value for name, value in values.items()}


def _neighbours(t: Trial, tried: Sequence[Trial], objective: Objective) -> float:
    """Return the mean score of the trials that differ from `t` in one knob; the score of `t` without such trials."""
    near = [other for other in tried if len(_differing(t, other)) == 1]
    scores = [objective.score(other.summary) or 0.0 for other in near or [t]]
    return sum(scores) / len(scores)


def _differing(first: Trial, other: Trial) -> set[str]:
    names = first.settings.keys() | other.settings.keys()
    missing = object()
    return {n for n in names if first.settings.get(n, missing) != other.settings.get(n, missing)}
