"""Finds what differs between the answers of two versions. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from difflib import SequenceMatcher

from kvtune.diff.answers import Answers, OfVersion
from kvtune.diff.answers import OfModel as Answer
from kvtune.diff.result import Diff, Figures, Load, Moved, Names, OfModel, Side

LIKE = 0.85
"""From this likeness of their words on, a name that is gone and a new one are the same thing."""
SHORT = 40
"""A help text below this length says too little to be recognized."""
BY_SIZE = re.compile(
    r"block_size|page_size|num_[cg]pu_blocks|memory_bytes|size_tokens|max_concurrency|hit_alignment"
)
"""Settings that follow from a model's shape and the device's memory: the figures have what comes of them."""


def diff(named: tuple[str, str], old: Answers, new: Answers, device: str, load: Load | None = None) -> Diff:
    """Return what differs. `named`: how the user calls the two versions."""
    before, after = old.version, new.version
    of_models = [_of_model(old.models[name], new.models[name]) for name in old.models if name in new.models]
    return Diff(
        old=Side(named=named[0], version=before.version, missed=before.missed),
        new=Side(named=named[1], version=after.version, missed=after.missed),
        device=device,
        models=of_models,
        defaults=[*_defaults(before, after), *_settings(old.models, new.models)],
        names=[names for names in _names(before, after) if names.gone or names.new or names.renamed],
        load=load,
    )


def figures(answer: Answer) -> Figures | None:
    """Return what a version makes of a model; None if it could not be asked."""
    facts = answer.facts
    if facts is None:
        return None
    kinds = Counter(
        (each.kind, each.layers, each.window, each.block_tokens * (each.block_tokens != facts.block_tokens))
        for each in facts.groups
    )
    groups = [
        f"{number} x {layers} {kind}{f' of {window}' if window else ''}{f' in blocks of {block}' if block else ''}"
        for (kind, layers, window, block), number in kinds.items()
    ]
    return Figures(
        gpus=answer.gpus,
        groups=groups,
        block=facts.block_tokens,
        hit_unit=facts.hit_tokens,
        hits=[round(100 * hit / max(1, answer.prompt), 2) for hit in answer.hits[1:]],
        pool_tokens=facts.tokens_fit,
        concurrency=round(facts.tokens_fit / facts.max_model_len, 2) if facts.max_model_len else 0.0,
        caching=facts.caching,
        retention="dense" if facts.retention is None else str(facts.retention),
        chunk=facts.batched_tokens,
        seats=facts.max_requests,
    )


def _of_model(old: Answer, new: Answer) -> OfModel:
    before, after = figures(old), figures(new)
    names = Figures.__struct_fields__ if before is not None and after is not None else ()
    differs = [name for name in names if getattr(before, name) != getattr(after, name)]
    failed = [f"{age}: {one.why}" for age, one in (("old", old), ("new", new)) if one.why]
    if old.why and old.why == new.why:
        failed = [f"both: {old.why}"]
    return OfModel(model=old.model, old=before, new=after, differs=differs, failed=failed)


def _settings(old: Mapping[str, Answer], new: Mapping[str, Answer]) -> list[Moved]:
    """Return the resolved settings that moved, each with the models for which it did so."""
    both = [name for name in old if name in new and old[name].settings and new[name].settings]
    found: dict[tuple[str, str, str], list[str]] = {}
    for model in both:
        before, after = old[model].settings, new[model].settings
        for setting in before.keys() & after.keys():
            if before[setting] != after[setting] and not BY_SIZE.search(setting):
                found.setdefault((setting, before[setting], after[setting]), []).append(model)
    return [
        Moved(setting=setting, old=was, new=now, models=models)
        for (setting, was, now), models in sorted(found.items())
    ]


def _defaults(old: OfVersion, new: OfVersion) -> Iterable[Moved]:
    """Yield the defaults of flags and variables that moved."""
    was, now = (
        {name: flag.default for name, flag in side.flags.items()} | side.variables for side in (old, new)
    )
    for name in sorted(was.keys() & now.keys()):
        if was[name] != now[name]:
            yield Moved(setting=name, old=was[name], new=now[name])


def _names(old: OfVersion, new: OfVersion) -> Iterable[Names]:
    def as_flags(one: str, other: str) -> float:
        was, now = old.flags[one], new.flags[other]
        if was.dest == now.dest:
            return 1.0
        told = likeness(was.help, now.help) if min(len(was.help), len(now.help)) > SHORT else 0.0
        return max(told, likeness(one, other) if was.default == now.default else 0.0)

    yield names("flags", old.flags, new.flags, as_flags)
    yield names("variables", old.variables, new.variables)
    yield names("metrics", old.metrics, new.metrics)
    yield names("KV events", _fields(old.events), _fields(new.events))


def _fields(events: Mapping[str, list[str]]) -> list[str]:
    return [*events, *(f"{kind}.{field}" for kind, fields in events.items() for field in fields)]


def likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def names(
    of: str, old: Iterable[str], new: Iterable[str], alike: Callable[[str, str], float] = likeness
) -> Names:
    """Return which names are gone, new, or renamed; the likest pair is taken first. Nothing if one side has none."""
    before, after = set(old), set(new)
    if not before or not after:
        return Names(of=of, gone=[], new=[], renamed={})
    gone, added = before - after, after - before
    pairs = sorted(
        ((alike(one, other), one, other) for one in gone for other in added), key=lambda pair: -pair[0]
    )
    renamed: dict[str, str] = {}
    for like, one, other in pairs:
        if like >= LIKE and one not in renamed and other not in renamed.values():
            renamed[one] = other
    return Names(
        of=of,
        gone=sorted(gone - renamed.keys()),
        new=sorted(added - set(renamed.values())),
        renamed=renamed,
    )
