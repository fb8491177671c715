"""What `kvtune diff` says: one sentence with the figure that moved most, then tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtune.causes import CAUSES
from kvtune.diff.answers import PREFIX_TOKENS, SUFFIX_TOKENS, Figures
from kvtune.diff.result import Diff, Load, OfModel
from kvtune.run.signature import identity
from kvtune.show.parts import Banner, Document, Section, grid
from kvtune.terminal import Column
from kvtune.units import count, percent
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
TITLES = {"caching": "prefix caching", "pool_tokens": "tokens in the pool"}
WORDS = {
    "caching": "prefix caching {}",
    "block": "blocks of {} tokens",
    "hit_unit": "hits in steps of {} tokens",
    "retention": "retention {}",
}
"""The figures that decide a model's hits, the first of them first."""
OF_LOAD = {
    "preemptions": "preemptions",
    "computed_twice": "tokens computed twice",
    "steps": "steps",
    "step_requests": "requests in a step, mean",
    "prefill_tokens": "tokens of prompts in steps",
    "decode_tokens": "tokens of answers in steps",
    "first_ms": "first token, ms at one nominal step cost",
    "gap_ms": "gap between tokens, ms at that cost",
}
SHOWN = 4
"""So many models are named beside a default."""


def document(diff: Diff) -> Document:
    which = f"vLLM {diff.old.version} to {diff.new.version}"
    missed = [f"{side.named}: {why}" for side in (diff.old, diff.new) for why in side.missed]
    return Document(
        name="kvtune diff",
        subject=which,
        headline=headline(diff),
        sections=tuple(_sections(diff)),
        identity=identity(
            "diff", diff.old.named, diff.new.named, diff.device, [m.model for m in diff.models]
        ),
        title=f"{which} · kvtune",
        banners=(
            *(Banner("bad", "A limit is met", text) for text in diff.broken),
            *(Banner("warn", "Not known", why) for why in missed),
        ),
    )


def headline(diff: Diff) -> str:
    """Return the answer in one sentence: the load's hits, else the model's that move most, else what else moved."""
    which = f"from vLLM {diff.old.version} to {diff.new.version}"
    load, differing = diff.load, [model for model in diff.models if model.differs]
    if load is not None and load.old is not None and load.new is not None:
        was, now = (100 * (side.rate or 0.0) for side in (load.old, load.new))
        if was == now:
            return f"your hits stay at {now:.1f} % {which}"
        why = f": {_why(differing[0])}" if differing else ""
        return f"your hits {'fall' if now < was else 'rise'} from {was:.1f} to {now:.1f} % {which}{why}"
    models = f"{len(diff.models)} model{'' if len(diff.models) == 1 else 's'}"
    if differing:
        worst = max(differing, key=_moved)
        old, new = _both(worst)
        others = f"; {len(differing)} of {models} differ" if len(diff.models) > 1 else ""
        hits = f" hits {_percents(new)} of a prefix that comes back instead of {_percents(old)}:"
        return f"{worst.model}{hits if old.hits != new.hits else ''} {_why(worst)} {which}{others}"
    gone = sum(len(names.gone) + len(names.renamed) for names in diff.names)
    known = sum(model.old is not None and model.new is not None for model in diff.models)
    if known < len(diff.models):
        models = f"{known} of {models}, all that both could be asked about"
    return (
        f"no figure differs {which} for {models}; {len(diff.defaults)} defaults moved, {gone} names are gone"
    )


def _both(model: OfModel) -> tuple[Figures, Figures]:
    """Return the figures of a model that differs: both versions know it."""
    assert model.old is not None and model.new is not None
    return model.old, model.new


def _moved(model: OfModel) -> tuple[float, float]:
    """Return how much a model's hits move, and its pool."""
    old, new = _both(model)
    hits = max((abs(a - b) for a, b in zip(old.hits, new.hits, strict=False)), default=0.0)
    return hits, abs(new.pool_tokens - old.pool_tokens) / max(1, old.pool_tokens)


def _why(model: OfModel) -> str:
    """Return the figure that moves a model's hits: the first of those that decide them, else the first that differs."""
    name = next(
        (name for name in (*WORDS, *model.differs) if name in model.differs and name != "hits"), "hits"
    )
    old, new = (_text(figures, name) for figures in _both(model))
    return f"{WORDS.get(name, f'{_title(name)} {{}}').format(new)} instead of {old}"


def _title(name: str) -> str:
    return TITLES.get(name, name.replace("_", " "))


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
    same = [model.model for model in diff.models if not (model.differs or model.failed)]
    rows = [_row(model) for model in diff.models if model.differs]
    yield Section(
        "models",
        "Models",
        lead=f"As on {diff.device}; pools {BY_MEMORY}: what activations and CUDA graphs take is unknown without an "
        f"engine there. Hits: percent of a prompt of {PREFIX_TOKENS} tokens that came before and {SUFFIX_TOKENS} "
        "new ones, or of the longest that the model takes.",
        tables=(grid(MODELS, rows),) if rows else (),
        notes=(
            *(f"{model.model}: {why}" for model in diff.models for why in model.failed),
            *((f"No figure differs for {', '.join(same)}.",) if same else ()),
        ),
    )
    if diff.defaults:
        moved = [(each.setting, each.old, each.new, _some(each.models)) for each in diff.defaults]
        yield Section("defaults", "Defaults that moved", tables=(grid(DEFAULTS, moved),))
    if diff.names:
        yield Section("names", "Names that are gone, renamed or new", notes=tuple(_names(diff)))


def _some(models: list[str]) -> str:
    more = f" and {len(models) - SHOWN} more" if len(models) > SHOWN else ""
    return ", ".join(models[:SHOWN]) + more or "every model"


def _names(diff: Diff) -> Iterator[str]:
    for names in diff.names:
        renamed = [f"{old} -> {new}" for old, new in names.renamed.items()]
        for what, which in (("gone", names.gone), ("likely renamed", renamed), ("new", names.new)):
            if which:
                yield f"{names.of}, {len(which)} {what}: {', '.join(which)}"


def _row(model: OfModel) -> list[str]:
    old, new = _both(model)
    hits = [_change(f"{was:.0f} %", f"{now:.0f} %") for was, now in zip(old.hits, new.hits, strict=True)]
    also = [
        f"{_title(name)} {_text(old, name)} -> {_text(new, name)}" for name in ALSO if name in model.differs
    ]
    spread = f" on {new.gpus} GPUs" if new.gpus > 1 else ""
    figures = [_change(_text(old, name), _text(new, name)) for name in FIGURES]
    return [f"{model.model}{spread}", *hits, *figures, "; ".join(also) or "–"]


def _change(was: str, now: str) -> str:
    return now if was == now else f"{was} -> {now}"


def _load(load: Load, versions: Sequence[str]) -> Section:
    sides = [side for side in (load.old, load.new) if side is not None]
    rows = [
        ("prompt tokens", *(count(side.query_tokens) for side in sides)),
        ("hits", *(f"{count(side.hit_tokens)} ({percent(side.rate or 0.0)})" for side in sides)),
        *(
            (CAUSES[cause].title, *(count(side.misses.get(cause, 0)) for side in sides))
            for cause in CAUSES
            if any(cause in side.misses for side in sides)
        ),
        *((title, *(f"{getattr(side, name):,}" for side in sides)) for name, title in OF_LOAD.items()),
    ]
    notes = list(load.failed)
    for parting in load.partings:
        changed = f"; changed in what decides it: {', '.join(parting.symbols)}" if parting.symbols else ""
        notes.append(
            f"{parting.what} {parting.number} is the first that differs: {parting.old} -> {parting.new}{changed}"
        )
    both = len(sides) == len(versions)
    if both and not load.partings:
        notes.append("both take the same steps and hit the same tokens of each request")
    heads = (Column(load.workload, right=False), *map(Column, versions))
    return Section("load", "The load", tables=(grid(heads, rows),) if both else (), notes=tuple(notes))
