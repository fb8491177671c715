"""What `kvtune diff` says: one sentence with the figure that moved most, then tables."""

from __future__ import annotations

from collections.abc import Iterator

from kvtune.causes import CAUSES
from kvtune.diff.answers import PREFIX_TOKENS, SUFFIX_TOKENS
from kvtune.diff.result import Diff, Figures, Load, OfModel
from kvtune.run.signature import identity
from kvtune.show.parts import Banner, Document, Section, grid
from kvtune.terminal import Column
from kvtune.units import count
from kvtune.vllm.platforms import BY_MEMORY

MODELS = (
    Column("model", right=False),
    Column("hits, 2nd visit"),
    Column("hits, 3rd"),
    Column("block"),
    Column("hit unit", rank=2),
    Column("tokens in the pool", rank=1),
    Column("longest requests at once", rank=4),
    Column("also", right=False, folds=True, rank=3, least=20),
)
DEFAULTS = tuple(Column(head, right=False, folds=True, least=12) for head in ("setting", "was", "is", "for"))
FIGURES = ("block", "hit_unit", "pool_tokens", "concurrency")
ALSO = ("caching", "retention", "chunk", "seats", "gpus", "groups")
WORDS = {
    "block": "blocks of {} tokens",
    "hit_unit": "hits in steps of {} tokens",
    "retention": "retention {}",
}
SHOWN = 4
"""So many models are named beside a default."""


def document(diff: Diff) -> Document:
    which = f"vLLM {diff.old.version} to {diff.new.version}"
    missed = [f"{side.named}: {why}" for side in (diff.old, diff.new) for why in side.missed]
    banners = [Banner("bad", "A limit is met", text) for text in diff.broken]
    return Document(
        name="kvtune diff",
        subject=which,
        headline=headline(diff),
        sections=tuple(_sections(diff)),
        identity=identity(
            "diff", diff.old.named, diff.new.named, diff.device, [m.model for m in diff.models]
        ),
        title=f"{which} · kvtune",
        banners=(*banners, *(Banner("warn", "Not known", why) for why in missed)),
    )


def headline(diff: Diff) -> str:
    """Return the answer in one sentence: the load's hits, else the model's that move most, else what else moved."""
    which = f"from vLLM {diff.old.version} to {diff.new.version}"
    load, differing = diff.load, [one for one in diff.models if one.differs and one.old and one.new]
    if load is not None and load.old is not None and load.new is not None:
        was, now = load.old.hit_percent, load.new.hit_percent
        if was == now:
            return f"your hits stay at {now:.1f} % {which}"
        why = f": {_why(differing[0])}" if differing else ""
        return f"your hits {'fall' if now < was else 'rise'} from {was:.1f} to {now:.1f} % {which}{why}"
    if differing:
        worst = max(differing, key=_moved)
        others = f"; {len(differing)} of {len(diff.models)} models differ" if len(diff.models) > 1 else ""
        assert worst.old is not None and worst.new is not None
        hits = ""
        if worst.old.hits != worst.new.hits:
            was_hit, now_hit = _percents(worst.old), _percents(worst.new)
            hits = f" hits {now_hit} of a prefix that comes back instead of {was_hit}:"
        return f"{worst.model}{hits} {_why(worst)} {which}{others}"
    gone = sum(len(names.gone) + len(names.renamed) for names in diff.names)
    models = f"{len(diff.models)} model{'' if len(diff.models) == 1 else 's'}"
    known = sum(one.old is not None and one.new is not None for one in diff.models)
    if known < len(diff.models):
        models = f"{known} of {models}, all that both could be asked about"
    return (
        f"no figure differs {which} for {models}; {len(diff.defaults)} defaults moved, {gone} names are gone"
    )


def _moved(model: OfModel) -> tuple[float, float]:
    """Return how much a model's hits move, and its pool."""
    assert model.old is not None and model.new is not None
    hits = max((abs(a - b) for a, b in zip(model.old.hits, model.new.hits, strict=False)), default=0.0)
    return hits, abs(model.new.pool_tokens - model.old.pool_tokens) / max(1, model.old.pool_tokens)


def _why(model: OfModel) -> str:
    """Return the figure that moves a model's hits: the first of those that decide them, else the first that differs."""
    assert model.old is not None and model.new is not None
    deciding = [name for name in ("caching", *WORDS) if name in model.differs]
    name = (deciding or [name for name in model.differs if name != "hits"] or ["hits"])[0]
    words = WORDS.get(name, f"{_title(name)} {{}}")
    return f"{words.format(_text(model.new, name))} instead of {_text(model.old, name)}"


def _title(name: str) -> str:
    return {"caching": "prefix caching", "pool_tokens": "tokens in the pool"}.get(
        name, name.replace("_", " ")
    )


def _percents(figures: Figures) -> str:
    return "/".join(f"{hit:.0f}" for hit in figures.hits) + " %"


def _text(figures: Figures, name: str) -> str:
    value = getattr(figures, name)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    return value if isinstance(value, str) else count(value) if isinstance(value, int) else f"{value:g}"


def _sections(diff: Diff) -> Iterator[Section]:
    if diff.load is not None:
        yield _load(diff.load, (diff.old.version, diff.new.version))
    same = [one.model for one in diff.models if not (one.differs or one.failed)]
    notes = [f"{model.model}: {why}" for model in diff.models for why in model.failed]
    rows = [_row(one, one.old, one.new) for one in diff.models if one.differs and one.old and one.new]
    yield Section(
        "models",
        "Models",
        lead=f"As on {diff.device}; pools {BY_MEMORY}. Hits: percent of a prompt of {PREFIX_TOKENS} tokens that came "
        f"before and {SUFFIX_TOKENS} new ones, or of the longest that the model takes.",
        tables=(grid(MODELS, rows),) if rows else (),
        notes=(*notes, *((f"No figure differs for {', '.join(same)}.",) if same else ())),
    )
    if diff.defaults:
        moved = [
            (one.setting, one.old, one.new, _models(one.models) if one.models else "every model")
            for one in diff.defaults
        ]
        yield Section("defaults", "Defaults that moved", tables=(grid(DEFAULTS, moved),))
    if diff.names:
        yield Section("names", "Names that are gone, renamed or new", notes=tuple(_names(diff)))


def _models(models: list[str]) -> str:
    return ", ".join(models[:SHOWN]) + (f" and {len(models) - SHOWN} more" if len(models) > SHOWN else "")


def _names(diff: Diff) -> Iterator[str]:
    for names in diff.names:
        renamed = [f"{old} -> {new}" for old, new in names.renamed.items()]
        for what, found in (("gone", names.gone), ("likely renamed", renamed), ("new", names.new)):
            if found:
                yield f"{names.of}, {len(found)} {what}: {', '.join(found)}"


def _row(model: OfModel, old: Figures, new: Figures) -> list[str]:
    hits = [_change(f"{was:.0f} %", f"{now:.0f} %") for was, now in zip(old.hits, new.hits, strict=True)]
    figures = [_change(_text(old, name), _text(new, name)) for name in FIGURES]
    also = [
        f"{_title(name)} {_text(old, name)} -> {_text(new, name)}" for name in ALSO if name in model.differs
    ]
    spread = f" on {new.gpus} GPUs" if new.gpus > 1 else ""
    return [f"{model.model}{spread}", *hits, *figures, "; ".join(also) or "–"]


def _change(was: str, now: str) -> str:
    return now if was == now else f"{was} -> {now}"


def _load(load: Load, versions: tuple[str, str]) -> Section:
    sides = [side for side in (load.old, load.new) if side is not None]
    rows = [
        ("prompt tokens", *(count(side.prompt_tokens) for side in sides)),
        ("hits", *(f"{count(side.hit_tokens)} ({side.hit_percent:.1f} %)" for side in sides)),
        *(
            (CAUSES[cause].title, *(count(side.misses.get(cause, 0)) for side in sides))
            for cause in CAUSES
            if any(cause in side.misses for side in sides)
        ),
        ("preemptions", *(count(side.preemptions) for side in sides)),
        ("tokens computed twice", *(count(side.computed_twice) for side in sides)),
        ("steps", *(count(side.steps) for side in sides)),
    ]
    notes = [
        f"{one.what} {one.number} is the first that differs: {one.old} -> {one.new}" for one in load.partings
    ]
    if load.partings and load.symbols:
        notes.append(f"changed in vLLM's scheduler and cache: {', '.join(load.symbols)}")
    both = len(sides) == len(versions)
    if both and not load.partings:
        notes.append("both take the same steps and hit the same tokens of each request")
    heads = (Column(load.workload, right=False), *map(Column, versions))
    return Section(
        "load", "The load", tables=(grid(heads, rows),) if both else (), notes=(*load.failed, *notes)
    )
