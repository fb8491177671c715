"""Measures each knob's effect: over all trials, and from the best setting with only that knob changed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvtune.answers.tune.objective import OBJECTIVES, Objective
from kvtune.answers.tune.result import Effect, Settings, Trial, ValueMean
from kvtune.data.recipe import Scalar

LEFT_OUT = "default"
"""The value shown for a knob that a trial does not set."""


def effects(trials: Sequence[Trial], objective: Objective) -> list[Effect]:
    """Return for each knob tried at several values the mean figure of each value, largest effect first."""
    tried: dict[str, dict[Scalar, list[float]]] = {}
    for trial, figure in objective.measured(trials):
        for knob, value in trial.settings.items():
            tried.setdefault(knob, {}).setdefault(value, []).append(figure)
    return _ranked(tried)


def around(leader: Trial, trials: Sequence[Trial], objective: Objective) -> list[Effect]:
    """Return by knob the figures of `leader` and of trials that differ in that knob only, largest effect first.

    Nothing else differs between these trials, so the knob is the cause. LEFT_OUT stands for the knob's default.
    """
    tried: dict[str, dict[Scalar, list[float]]] = {}
    measured = [row for row in objective.measured([leader, *trials]) if row[0].core == leader.core]
    for knob in dict.fromkeys(name for t in trials for name in t.settings):
        rest = _without(knob, leader)
        for trial, figure in measured:
            if _without(knob, trial) == rest:
                tried.setdefault(knob, {}).setdefault(trial.settings.get(knob, LEFT_OUT), [figure])
    return _ranked(tried)


def _without(knob: str, trial: Trial) -> Settings:
    return {name: value for name, value in trial.settings.items() if name != knob}


def _ranked(tried: Mapping[str, Mapping[Scalar, Sequence[float]]]) -> list[Effect]:
    """Return the effects of the knobs with several values, from the figures of each value; the largest first."""
    effects = [
        Effect(knob, tuple(ValueMean(v, sum(f) / len(f), len(f)) for v, f in values.items()))
        for knob, values in tried.items()
        if len(values) > 1
    ]
    return sorted(effects, key=lambda e: -e.spread)


def notes(trials: Sequence[Trial]) -> list[str]:
    """Return a remark if no trial hit anything, as then no knob can help; else an empty list."""
    rates = [rate for _, rate in OBJECTIVES["hit-rate"].measured(trials)]
    if not rates or any(rates):
        return []
    return [
        "nothing hit with any of these settings: `kvtune bounds` shows what a larger pool would buy, "
        "`kvtune doctor` the shortest prefix that can hit"
    ]
