"""`--fail-on` on the figures of both versions, such as `hits < -2 points`. Pure."""

from __future__ import annotations

from kvtune.analysis.comparison.fail_on import FailOn, parse_fail_on
from kvtune.diff.answers import Figures
from kvtune.diff.result import Diff, OfModel, Replayed


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
    known = [model for model in diff.models if model.old and model.new] or diff.models[:1]
    lines = []
    for model in known:
        before, after = ({**counts, **_figures(diff, model, side)} for side in ("old", "new"))
        lines += [f"{model.model}: {reason}" for reason in condition.evaluate(before, after).reasons]
    return lines


def _figures(diff: Diff, model: OfModel, side: str) -> dict[str, float | None]:
    """Return the figures of a side. Of a load the hits are its own, not those of a prefix that comes back."""
    figures: Figures | None = getattr(model, side)
    replayed: Replayed | None = getattr(diff.load, side, None)
    hits = None if replayed is None else 100 * (replayed.rate or 0.0)
    if diff.load is None and figures is not None:
        hits = min(figures.hits, default=0.0)
    names = {"pool": "pool_tokens", "concurrency": "concurrency", "block": "block"}
    return {"hits": hits, **{name: getattr(figures, field, None) for name, field in names.items()}}
