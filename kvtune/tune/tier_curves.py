"""How much host memory is worth it: hits, computed tokens and first-token times over its size, with the knee. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from kvtune.analysis.offload import FEWEST, knee, tier_gib
from kvtune.analysis.study import Place, Settings, TierCurve, TierPoint, Trial
from kvtune.tune.objective import OBJECTIVES
from kvtune.tune.space.knobs import TIER

SIZE = TIER[0]


def tier_curves(trials: Sequence[Trial], on: Place) -> tuple[TierCurve, ...]:
    """Trials that differ in nothing but the tier's size, with the same engine without a tier where there is one.

    Curves of fewer points than a knee needs are left out. The one with the most hits comes first.
    """
    done = [t for t in trials if t.on == on and t.state == "complete" and _hit_rate(t) is not None]
    without = {_key(t, TIER): t for t in reversed(done) if not tier_gib(t.summary)}
    curves: dict[str, list[Trial]] = {}
    for trial in done:
        if tier_gib(trial.summary):
            curves.setdefault(_key(trial, (SIZE,)), []).append(trial)
    found = []
    for tried in curves.values():
        none = without.get(_key(tried[0], TIER))
        by_size = {tier_gib(t.summary): t for t in reversed([*tried, *([none] if none else [])])}
        points = tuple(_point(by_size[gib]) for gib in sorted(by_size))
        if len(points) >= FEWEST:
            bend = knee([(point.gib, point.hit_rate) for point in points])
            found.append(TierCurve(_without(tried[0].settings, (SIZE,)), tried[0].core, points, bend))
    return tuple(sorted(found, key=lambda c: -max(point.hit_rate for point in c.points)))


def _key(trial: Trial, names: Sequence[str]) -> str:
    return json.dumps([trial.core, _without(trial.settings, names)], sort_keys=True)


def _without(settings: Settings, names: Sequence[str]) -> Settings:
    return {name: value for name, value in settings.items() if name not in names}


def _hit_rate(trial: Trial) -> float | None:
    return OBJECTIVES["hit-rate"].of(trial.summary)


def _point(trial: Trial) -> TierPoint:
    cache, tier = trial.summary["prefix_cache"], trial.summary.get("offload")
    return TierPoint(
        gib=tier_gib(trial.summary),
        hit_rate=_hit_rate(trial) or 0.0,
        tier_hit_rate=(tier.get("tier_hit_rate") or 0.0) if tier else 0.0,
        computed_tokens=cache.get("query_tokens", 0) - cache.get("hit_tokens", 0),
        ttft_ms=OBJECTIVES["ttft"].of(trial.summary),
        trial=trial.number,
    )
