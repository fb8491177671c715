"""The settings that a sweep tries: the grid of the named knobs' values, or a seeded sample of it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from kvtune.answers.tune.result import Settings
from kvtune.base.errors import UsageError
from kvtune.data.knobs import AUTO, GROUPS, KNOBS, LAYOUT, TIER, TIER_SIZE, Bundle, ModelFacts, named
from kvtune.data.recipe import Scalar, text_of

Space = dict[str, tuple[Scalar | Bundle, ...]]
"""Knob -> values; the knobs are in the order in which they were named."""

MOST = 5_000
"""The most trials of a grid; a larger grid must be sampled."""


def build_space(groups: Sequence[str], assignments: Sequence[str], facts: ModelFacts) -> Space:
    """Return the space of `--pin --block-size .. --set KNOB=V1,V2`; `--set` overrides a group's values of that knob."""
    space: Space = {name: KNOBS[name].candidates(facts) for group in groups for name in GROUPS[group]}
    if "block_size" in space and facts.layouts:
        space = {LAYOUT if name == "block_size" else name: values for name, values in space.items()}
        space[LAYOUT] = facts.layouts
    given: set[str] = set()
    for text in assignments:
        head, equals, values = text.partition("=")
        name = named(head)
        if not equals or not values.strip():
            shown = ", ".join(map(str, KNOBS[name].candidates(facts)))
            raise UsageError(
                f"--set {text} has no values", f"write --set {name}=V1,V2,..; worth a trial: {shown}"
            )
        if name in given:
            raise UsageError(f"--set {name} is given twice", "name all its values at once: KNOB=V1,V2,..")
        given.add(name)
        read = tuple(dict.fromkeys(KNOBS[name].read_for(v.strip(), facts) for v in values.split(",")))
        space[name] = read
        if KNOBS[name].acts == "layout":
            space.pop(LAYOUT, None)
    return space


def settings_of(chosen: Mapping[str, Scalar | Bundle]) -> Settings:
    """Return a point of the space as settings: expand a layout into its settings, drop knobs without effect."""
    settings: Settings = {}
    for name, value in chosen.items():
        if isinstance(value, tuple):
            settings |= dict(value)
        else:
            settings[name] = value
    if settings.get("packed") is False:
        settings.pop("states_per_block", None)
    if settings.get("policy", AUTO) not in (AUTO, "two_class"):
        settings.pop("reuse_bonus_s", None)
        settings.pop("ghost_factor", None)
    if settings.get(TIER_SIZE) == 0:
        for name in TIER:
            settings.pop(name, None)
    return settings


def engine_only(space: Space) -> None:
    """Raise UsageError if the space has a knob that only an engine can try."""
    for name in space:
        if name in KNOBS and not KNOBS[name].replayed:
            raise UsageError(
                f"{name} changes nothing in simulation",
                "add --on engine or --on host, or leave out --gc and such knobs",
            )


def needs_tier(space: Space, given: Collection[str]) -> None:
    """Raise UsageError if the space has tier knobs, but neither the space nor the flags (`given`) turn a tier on."""
    of_tier = [name for name in TIER if name in space]
    if of_tier and TIER_SIZE not in space and TIER_SIZE not in given:
        raise UsageError(
            f"{of_tier[0]} changes nothing without a tier of host memory",
            "add --kv-offloading-size GIB after `--`, or --set kv_offloading_size=GIB,..",
        )


def size(space: Space) -> int:
    return prod(len(values) for values in space.values())


def grid(space: Space) -> Iterator[Settings]:
    """Yield every combination once; the last knob changes fastest. An empty space yields the defaults once."""
    seen = set()
    for values in itertools.product(*space.values()):
        settings = settings_of(dict(zip(space, values, strict=True)))
        if (key := shown(settings)) not in seen:
            seen.add(key)
            yield settings


def choose(space: Space, trials: int, seed: int) -> list[Settings]:
    """Return `trials` different settings sampled from the grid with `seed` (0 trials: the whole grid, in order)."""
    total = size(space)
    if not trials and total > MOST:
        raise UsageError(
            f"this grid has {total:,} trials",
            "add --trials N to try N of them, or name fewer values with --set",
        )
    if not trials or trials >= total:
        return list(grid(space))
    import random

    numbers = random.Random(seed).sample(range(total), trials)
    return list(
        {shown(settings): settings for settings in (_at(space, number) for number in numbers)}.values()
    )


def _at(space: Space, number: int) -> Settings:
    settings: dict[str, Scalar | Bundle] = {}
    for name, values in reversed(space.items()):
        number, i = divmod(number, len(values))
        settings[name] = values[i]
    return settings_of({name: settings[name] for name in space})


def shown(settings: Mapping[str, Scalar]) -> str:
    """Return the settings as text: `pin_window=0 slack=512`, or `defaults`."""
    return " ".join(f"{name}={text_of(value)}" for name, value in settings.items()) or "defaults"
