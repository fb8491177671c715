"""Measures each knob's effect: over all trials, and from the best setting with only that knob changed. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.answers.tune.objective import OBJECTIVES, Objective
from kvtune.answers.tune.result import Effect, Trial, ValueMean
from kvtune.data.recipe import Scalar

LEFT_OUT = "default"
"""The value shown for a knob that a trial does not set."""


def effects(trials: Sequence[Trial], objective: Objective) -> list[Effect]:
    """Return for each knob tried at several values the mean figure of each value, largest effect first."""
    scored = objective.measured(trials)
    ranked = []
    for knob in dict.fromkeys(name for t, _ in scored for name in t.settings):
        values: dict[Scalar, list[float]] = {}
        for trial, figure in scored:
            if knob in trial.settings:
                values.setdefault(trial.settings[knob], []).append(figure)
        if len(values) > 1:
            means = tuple(ValueMean(v, sum(f) / len(f), len(f)) for v, f in values.items())
            ranked.append(Effect(knob, means))
    return sorted(ranked, key=lambda e: -e.spread)


def around(leader: Trial, trials: Sequence[Trial], objective: Objective) -> list[Effect]:
    """Return by knob the figures of `leader` and of trials that differ in that knob only, largest effect first.

    Nothing else differs between these trials, so the knob is the cause. LEFT_OUT stands for the knob's default.
    """
    effects = []
    for knob in dict.fromkeys(name for t in trials for name in t.settings):
        rest = {name: value for name, value in leader.settings.items() if name != knob}
        values: dict[Scalar, float] = {}
        for trial in (leader, *trials):
            others = {name: value for name, value in trial.settings.items() if name != knob}
            figure = objective.of(trial.summary)
            if (
                trial.core == leader.core
                and trial.state == "complete"
                and others == rest
                and figure is not None
            ):
                values.setdefault(trial.settings.get(knob, LEFT_OUT), figure)
        if len(values) > 1:
            effects.append(Effect(knob, tuple(ValueMean(v, figure, 1) for v, figure in values.items())))
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
