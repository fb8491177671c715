"""What `kvtune diff` says: one sentence with the figure that moved most, then tables."""

from __future__ import annotations

from collections.abc import Iterator

from kvtune.answers.diff.answers import PREFIX_TOKENS, SUFFIX_TOKENS
from kvtune.answers.diff.result import Diff, Load, OfModel, Replayed, Value
from kvtune.base.units import count
from kvtune.data.causes import CAUSES
from kvtune.data.platforms import BY_MEMORY
from kvtune.data.run.signature import identity
from kvtune.data.show.parts import Banner, Document, Section, grid
from kvtune.data.show.terminal import Column

MODELS, DEFAULTS = (
    tuple(Column(head, right=False, folds=True, least=12) for head in heads)
    for heads in (("model", "figure", "was", "is"), ("setting", "was", "is", "for"))
)
WORDS = {
    "prefix_caching": "prefix caching {}",
    "block": "blocks of {} tokens",
    "hit_unit": "hits in steps of {} tokens",
    "retention": "retention {}",
}
"""The figures that decide a model's hits, the first of them first."""
OF_LOAD = [name for name in Replayed.__struct_fields__ if name != "misses"]
SHOWN = 4
"""So many models are named beside a default."""


def document(diff: Diff) -> Document:
    which = f"vLLM {diff.old} to {diff.new}"
    return Document(
        name="kvtune diff",
        subject=which,
        headline=headline(diff),
        sections=tuple(_sections(diff)),
        identity=identity("diff", diff.old, diff.new, diff.device, [m.model for m in diff.models]),
        title=f"{which} · kvtune",
        banners=(
            *(Banner("bad", "A limit is met", text) for text in diff.broken),
            *(Banner("warn", "Not known", why) for why in diff.missed),
        ),
    )


def headline(diff: Diff) -> str:
    """Return the answer in one sentence: the load's hits, else the model's that move most, else what else moved."""
    if not diff.models:
        return f"both are vLLM {diff.old}: nothing was asked, as nothing can differ"
    which = f"from vLLM {diff.old} to {diff.new}"
    load, differing = diff.load, [model for model in diff.models if model.differs]
    if load is not None and load.old is not None and load.new is not None:
        was, now = load.old.percent, load.new.percent
        if was == now:
            return f"your hits stay at {now:.1f} % {which}"
        why = f": {_why(differing[0])}" if differing else ""
        return f"your hits {'fall' if now < was else 'rise'} from {was:.1f} to {now:.1f} % {which}{why}"
    models = f"{len(diff.models)} model{'' if len(diff.models) == 1 else 's'}"
    if differing:
        worst = max(differing, key=_moved)
        others = f"; {len(differing)} of {models} differ" if len(diff.models) > 1 else ""
        old, new = map(_text, worst.differs.get("hits", ("", "")))
        hits = f" hits {new} of a prefix that comes back instead of {old}:" if old else ""
        return f"{worst.model}{hits} {_why(worst)} {which}{others}"
    gone = sum(len(names.gone) + len(names.renamed) for names in diff.names)
    asked = sum(model.old is not None and model.new is not None for model in diff.models)
    if not asked:
        return f"{diff.models[0].model} cannot be compared: {'; '.join(diff.models[0].failed)}"
    if asked < len(diff.models):
        models = f"{asked} of {models}, all that both could be asked about"
    return (
        f"no figure differs {which} for {models}; {len(diff.defaults)} defaults moved, {gone} names are gone"
    )


def _moved(model: OfModel) -> tuple[float, float]:
    """Return how much a model's hits move, and its pool."""
    assert model.old is not None and model.new is not None
    hits = (abs(new - old) for old, new in zip(model.old.hits, model.new.hits, strict=True))
    old, new = model.old.pool_tokens, model.new.pool_tokens
    return max(hits), abs(new - old) / max(1, old)


def _why(model: OfModel) -> str:
    """Return the figure that moves a model's hits: the first of those that decide them, else the first that differs."""
    name = min(model.differs, key=lambda name: [*WORDS, name].index(name))
    old, new = map(_text, model.differs[name])
    return f"{WORDS.get(name, f'{_title(name)} {{}}').format(new)} instead of {old}"


def _title(name: str) -> str:
    return name.replace("_", " ")


def _text(value: Value) -> str:
    if isinstance(value, list):
        floats = [f"{each:.0f}" for each in value if isinstance(each, float)]
        return f"{'/'.join(floats)} %" if floats else ", ".join(map(str, value))
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return count(value)
    return value if isinstance(value, str) else f"{value:g}"


def _sections(diff: Diff) -> Iterator[Section]:
    if diff.load is not None:
        yield _load(diff.load, (diff.old, diff.new))
    same = [model.model for model in diff.models if not (model.differs or model.failed)]
    rows = [
        (model.model, _title(name), *map(_text, values))
        for model in diff.models
        for name, values in model.differs.items()
    ]
    if not diff.models:
        return
    yield Section(
        "models",
        "Models",
        lead=f"As on {diff.device}; pools {BY_MEMORY}: what these take is unknown without an engine. Hits: percent of "
        f"a prompt of {PREFIX_TOKENS} tokens that came before and {SUFFIX_TOKENS} new ones, or of the longest that "
        "the model takes, at its 2nd and 3rd visit. Concurrency: requests of the longest length.",
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


def _load(load: Load, versions: tuple[str, str]) -> Section:
    notes = list(load.failed)
    for parting in load.partings:
        changed = f"; changed in what decides it: {', '.join(parting.symbols)}" if parting.symbols else ""
        notes.append(
            f"{parting.what} {parting.number} is the first that differs: {parting.old} -> {parting.new}{changed}"
        )
    if load.old is None or load.new is None:
        return Section("load", "The load", notes=tuple(notes))
    if not load.partings:
        notes.append("both take the same steps and hit the same tokens of each request")
    notes.append(
        "the times are means at one nominal step cost, the same for both: they compare, and are no device's"
    )
    old, new = load.old, load.new
    rows: list[tuple[object, ...]] = [("hits, %", f"{old.percent:.1f}", f"{new.percent:.1f}")]
    rows += [(_title(name), getattr(old, name), getattr(new, name)) for name in OF_LOAD]
    rows += [
        (cause.title, old.misses.get(name, 0), new.misses.get(name, 0))
        for name, cause in CAUSES.items()
        if name in old.misses or name in new.misses
    ]
    heads = (Column(load.workload, right=False), *map(Column, versions))
    return Section("load", "The load", tables=(grid(heads, rows),), notes=tuple(notes))
