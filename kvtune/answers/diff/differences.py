"""Finds what differs between the answers of two versions, and which limits of --fail-on that meets. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import SequenceMatcher

from msgspec.structs import asdict

from kvtune.answers.diff.answers import Answers, Figures, ModelReply, OfVersion
from kvtune.answers.diff.result import Diff, Load, Moved, Names, OfModel
from kvtune.base.errors import UsageError
from kvtune.reading.analysis.comparison.fail_on import FailOn

LIKE = 0.85
"""From this likeness on, a name that is gone and a new one are the same thing."""
BY_SIZE = re.compile(
    r"block_size|page_size|num_[cg]pu_blocks|memory_bytes|size_tokens|max_concurrency|hit_alignment"
)
"""Settings that follow from a model's shape and the device's memory: the figures have what comes of them."""


def compare(old: Answers, new: Answers, device: str, load: Load | None = None) -> Diff:
    before, after = old.version.names, new.version.names
    differing = [names(kind, before[kind], after[kind]) for kind in before if kind in after]
    return Diff(
        old=old.version.version,
        new=new.version.version,
        device=device,
        missed=_missed(old.version, new.version),
        models=[_of_model(old.models[name], new.models[name]) for name in old.models],
        defaults=_defaults(old, new),
        names=[each for each in differing if each.gone or each.new or each.renamed],
        load=load,
    )


def refuse_unanswered(old: Answers, new: Answers) -> None:
    """Raise UsageError, with the first reason, if no version could be asked about any model."""
    if any(reply.figures or reply.settings for side in (old, new) for reply in side.models.values()):
        return
    model = next(iter(old.models))
    why = "; ".join(_missed(old.models[model], new.models[model]))
    raise UsageError(f"{model}: {why}", "name a model that one of the versions takes")


def _missed(old: OfVersion | ModelReply, new: OfVersion | ModelReply) -> list[str]:
    """Return why one could not be asked, once if it is the same of both."""
    if old.missed == new.missed:
        return [f"both: {why}" for why in old.missed]
    return [f"{age}: {why}" for age, side in (("old", old), ("new", new)) for why in side.missed]


def _of_model(old: ModelReply, new: ModelReply) -> OfModel:
    was, now = ({} if side.figures is None else asdict(side.figures) for side in (old, new))
    return OfModel(
        model=old.model,
        old=old.figures,
        new=new.figures,
        differs={name: (was[name], now[name]) for name in was if name in now and was[name] != now[name]},
        failed=_missed(old, new),
    )


def _defaults(old: Answers, new: Answers) -> list[Moved]:
    """Return the defaults that moved, and the resolved settings, each with the models for which it did so."""
    of_version, names = "", new.version.names
    sides = [(of_version, named, names.get(kind, {})) for kind, named in old.version.names.items()]
    sides += [(model, old.models[model].settings, new.models[model].settings) for model in old.models]
    moved: dict[tuple[str, str, str], list[str]] = {}
    for model, was, now in sides:
        for name in was.keys() & now.keys():
            if was[name] != now[name] and not BY_SIZE.search(name):
                moved.setdefault((name, was[name], now[name]), []).append(model)
    return [
        Moved(setting=setting, old=was, new=now, models=list(filter(None, models)))
        for (setting, was, now), models in sorted(moved.items())
    ]


def names(owner: str, old: Mapping[str, str], new: Mapping[str, str]) -> Names:
    """Return which names are gone, new, or renamed: much alike and with one default, the likest pair first."""
    gone, added = old.keys() - new.keys(), new.keys() - old.keys()
    pairs = (
        (SequenceMatcher(None, name, other, autojunk=False).ratio(), name, other)
        for name in gone
        for other in added
        if old[name] == new[other]
    )
    renamed: dict[str, str] = {}
    for like, name, other in sorted(pairs, reverse=True):
        if like >= LIKE and name not in renamed and other not in renamed.values():
            renamed[name] = other
    return Names(
        of=owner,
        gone=sorted(gone - renamed.keys()),
        new=sorted(added - set(renamed.values())),
        renamed=renamed,
    )


def broken(diff: Diff, condition: FailOn) -> list[str]:
    """Return a line for each model for which the condition holds. KvtuneError if it names what is not known.

    Of a load the hits are its own, not those of a prefix that comes back.
    """
    counts = {
        "defaults": len(diff.defaults),
        "gone": sum(len(names.gone) + len(names.renamed) for names in diff.names),
        "unknown": sum(bool(model.failed) for model in diff.models),
    }
    lines = []
    for model in [model for model in diff.models if model.old and model.new] or diff.models[:1]:
        sides = []
        for side in ("old", "new"):
            figures = getattr(model, side)
            fields = asdict(figures) if figures else dict.fromkeys(Figures.__struct_fields__)
            hits = min(figures.hits) if figures else None
            if diff.load is not None:
                hits = getattr(getattr(diff.load, side), "percent", None)
            sides.append({**counts, **fields, "hits": hits})
        lines += [f"{model.model}: {reason}" for reason in condition.evaluate(*sides).reasons]
    return lines
