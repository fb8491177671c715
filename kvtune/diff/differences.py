"""Finds what differs between the answers of two versions. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import SequenceMatcher

from kvtune.diff.answers import Answers, Figures, OfVersion
from kvtune.diff.answers import OfModel as Answer
from kvtune.diff.result import Diff, Load, Moved, Names, OfModel, Side

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
    sides = [
        Side(named=name, version=answers.version.version, missed=answers.version.missed)
        for name, answers in zip(named, (old, new), strict=True)
    ]
    return Diff(
        old=sides[0],
        new=sides[1],
        device=device,
        models=[_of_model(old.models[name], new.models[name]) for name in old.models],
        defaults=[*_defaults(old.version, new.version), *_settings(old.models, new.models)],
        names=[each for each in _names(old.version, new.version) if each.gone or each.new or each.renamed],
        load=load,
    )


def _of_model(old: Answer, new: Answer) -> OfModel:
    both = old.figures is not None and new.figures is not None
    failed = [f"{age}: {why}" for age, side in (("old", old), ("new", new)) for why in side.missed]
    if old.missed == new.missed:
        failed = [f"both: {why}" for why in old.missed]
    return OfModel(
        model=old.model,
        old=old.figures,
        new=new.figures,
        differs=[
            name
            for name in Figures.__struct_fields__
            if both and getattr(old.figures, name) != getattr(new.figures, name)
        ],
        failed=failed,
    )


def _settings(old: Mapping[str, Answer], new: Mapping[str, Answer]) -> Iterator[Moved]:
    """Yield the resolved settings that moved, each with the models for which it did so."""
    moved: dict[tuple[str, str, str], list[str]] = {}
    for model in old:
        before, after = old[model].settings, new[model].settings
        for setting in before.keys() & after.keys():
            if before[setting] != after[setting] and not BY_SIZE.search(setting):
                moved.setdefault((setting, before[setting], after[setting]), []).append(model)
    for (setting, was, now), models in sorted(moved.items()):
        yield Moved(setting=setting, old=was, new=now, models=models)


def _defaults(old: OfVersion, new: OfVersion) -> Iterator[Moved]:
    """Yield the defaults of flags and variables that moved."""
    was, now = (
        {name: flag.default for name, flag in side.flags.items()} | side.variables for side in (old, new)
    )
    for name in sorted(was.keys() & now.keys()):
        if was[name] != now[name]:
            yield Moved(setting=name, old=was[name], new=now[name])


def _names(old: OfVersion, new: OfVersion) -> Iterator[Names]:
    def alike(name: str, other: str) -> float:
        was, now = old.flags[name], new.flags[other]
        if was.dest == now.dest:
            return 1.0
        helps = likeness(was.help, now.help) if min(len(was.help), len(now.help)) > SHORT else 0.0
        return max(helps, likeness(name, other) if was.default == now.default else 0.0)

    yield names("flags", old.flags, new.flags, alike)
    yield names("variables", old.variables, new.variables)
    yield names("metrics", old.metrics, new.metrics)
    yield names("KV events", _fields(old.events), _fields(new.events))


def _fields(events: Mapping[str, list[str]]) -> list[str]:
    return [*events, *(f"{kind}.{field}" for kind, fields in events.items() for field in fields)]


def likeness(name: str, other: str) -> float:
    return SequenceMatcher(None, name, other, autojunk=False).ratio()


def names(
    of: str, old: Iterable[str], new: Iterable[str], alike: Callable[[str, str], float] = likeness
) -> Names:
    """Return which names are gone, new, or renamed; the likest pair is taken first. Nothing if one side has none."""
    before, after = set(old), set(new)
    gone, added = (before - after, after - before) if before and after else (set[str](), set[str]())
    pairs = ((alike(name, other), name, other) for name in gone for other in added)
    renamed: dict[str, str] = {}
    for like, name, other in sorted(pairs, key=lambda pair: -pair[0]):
        if like >= LIKE and name not in renamed and other not in renamed.values():
            renamed[name] = other
    return Names(
        of=of,
        gone=sorted(gone - renamed.keys()),
        new=sorted(added - set(renamed.values())),
        renamed=renamed,
    )
