"""`--fail-on` on the figures of both versions, such as `hits < -2 points`. Pure."""

from __future__ import annotations

from kvtune.analysis.comparison.fail_on import FailOn, parse_fail_on
from kvtune.diff.result import Diff, Figures, Replayed

OF_MODELS = ("hits", "pool", "concurrency", "block")


def limit(text: str) -> FailOn:
    """Read a condition as `kvtune compare` does. Hits are in points."""
    return parse_fail_on(text.replace(" points", ""))


def broken(diff: Diff, condition: FailOn) -> list[str]:
    """Return a line for each model for which the condition holds. KvtuneError if it names what is not known."""
    counts = {
        "defaults": len(diff.defaults),
        "gone": sum(len(names.gone) + len(names.renamed) for names in diff.names),
        "unknown": sum(bool(model.failed) for model in diff.models),
    }
    old, new = (diff.load.old, diff.load.new) if diff.load else (None, None)
    known = [model for model in diff.models if model.old and model.new] or diff.models[:1]
    found = []
    for model in known:
        sides = (_figures(model.old, old, diff), _figures(model.new, new, diff))
        before, after = ({**counts, **side} for side in sides)
        found += [f"{model.model}: {reason}" for reason in condition.evaluate(before, after).reasons]
    return found


def _figures(figures: Figures | None, load: Replayed | None, diff: Diff) -> dict[str, float | None]:
    """Return the figures of a side. Of a load the hits are its own, not those of a prefix that comes back."""
    if figures is None:
        return dict.fromkeys(OF_MODELS)
    hits = min(figures.hits, default=0.0) if diff.load is None else load.hit_percent if load else None
    return dict(zip(OF_MODELS, (hits, figures.pool_tokens, figures.concurrency, figures.block), strict=True))
