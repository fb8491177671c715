"""What each knob did in a sweep: the mean figure of the trials at each of its values, others averaged over. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvtune.analysis.study import Effect, Trial, ValueMean
from kvtune.recipe import Scalar
from kvtune.tune.objective import OBJECTIVES, Objective
from kvtune.tune.space.grid import shown

FEWEST = 3
"""Fewest trials of a value before a note blames it: with fewer, another knob may be the cause."""


def effects(trials: Sequence[Trial], by: Objective) -> list[Effect]:
    """The marginal effect of each knob with more than one value, the largest first."""
    scored = [
        (t, figure) for t in trials if t.state == "complete" and (figure := by.of(t.summary)) is not None
    ]
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


def notes(trials: Sequence[Trial]) -> list[str]:
    """Remarks on zero hit rates: of all trials, or of some values of a knob while others hit."""
    remarks = []
    by = OBJECTIVES["hit-rate"]
    rates = [rate for t in trials if t.state == "complete" and (rate := by.of(t.summary)) is not None]
    if rates and not any(rates):
        return [
            "nothing hit with any of these settings: `kvtune bounds` shows what a larger pool would buy, "
            "`kvtune doctor` the shortest prefix that can hit"
        ]
    ranked = effects([t for t in trials if t.role == "trial"], by)
    # In a search, one or two trials of a value differ in other knobs, too.
    enough = 1 if len(ranked) == 1 else FEWEST
    for effect in ranked:
        none = [value for value, mean, count in effect.means if mean == 0 and count >= enough]
        if none and len(none) < len(effect.means):
            values = shown({effect.knob: none[0]}) + "".join(f", {value}" for value in none[1:])
            remarks.append(
                f"nothing hit with {values}: run one of them with `kvtune profile --on sim`, "
                "and `kvtune explain` says of its run what was missed and why"
            )
    return remarks
