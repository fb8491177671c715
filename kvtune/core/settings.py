"""The core's switches and knobs: names, legal values, defaults. Read by the CLI, the tuner and vLLM's processes.

`KNOBS` is the one table for flag parsers, the tuner and reports; `CoreSettings` holds the values. A switch turns one
optimization on or off (off = vLLM's own code); the other knobs tune it.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvtune.errors import UsageError, did_you_mean
from kvtune.legal import Legal, Value
from kvtune.recipe import tune_again

POLICIES = ("first", "two_class", "chat", "pin", "lru")
GONE_POLICIES = ("density", "tiered")
GONE = (
    "reuse",
    "protected_share",
    "admission",
    "admission_age_s",
    "legacy_empty_blocks",
    "legacy_free_list",
)
"""Settings of older versions that run files and recipes may still hold. They are ignored."""
AUTO = "auto"
"""Means `two_class` if its bonus is tuned, else `first` for models with sliding windows, else stock's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob(Legal):
    """One field of CoreSettings: its name, help, default and legal values."""

    name: str
    help: str
    default: Value

    def read(self, value: object) -> Value:
        """Return the value as this knob's type; UsageError if it is not legal."""
        legal = Legal.read(self, value)
        if legal is None:
            raise UsageError(f"core.{self.name}={value!r} is not legal", f"{self.name} takes {self.legal}")
        return legal


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """The core's settings; KNOBS has each field's help and legal values."""

    pool: bool = True
    pinning: bool = True
    rows: bool = True
    steady: bool = True
    empty_blocks: bool = True
    freeze: bool = True
    front_end: bool = True
    policy: str = AUTO
    pin_window: int = 0
    min_drop: int = 16
    slack: int = 512
    windows: int = 4
    output_window: bool = True
    reuse_bonus_s: float = 0.0
    ghost_factor: float = 4.0
    gc_threshold0: int = 0
    gc_threshold1: int = 0
    gc_threshold2: int = 0
    collect_at_wait: bool = False
    whole_states: bool = False
    packed: bool = False
    states_per_block: int = 1
    strict: bool = False

    def to_dict(self) -> dict[str, Value]:
        return asdict(self)

    def changed(self) -> dict[str, Value]:
        """Return only the settings that differ from the defaults."""
        default = CoreSettings().to_dict()
        return {name: value for name, value in self.to_dict().items() if value != default[name]}

    def switches(self) -> tuple[str, ...]:
        """Return the switches in effect: `pinning` needs `pool`, and `packed` turns on `whole_states`."""
        own = {"pinning": self.pool and self.pinning, "whole_states": self.whole_states or self.packed}
        names = ("pool", "rows", "steady", "empty_blocks", "freeze", "collect_at_wait", "front_end", "packed")
        return tuple(name for name in names if getattr(self, name)) + tuple(
            name for name, on in own.items() if on
        )


def without(settings: CoreSettings, switches: Collection[str]) -> CoreSettings:
    """Return the settings with these switches off."""
    off: dict[str, Any] = dict.fromkeys(switches, False)
    return replace(settings, **off)


def _switch(name: str, help: str) -> Knob:
    return Knob(name=name, kind="switch", help=help, default=getattr(CoreSettings(), name))


def _integer(name: str, help: str, low: int, high: int, unit: str = "") -> Knob:
    default = getattr(CoreSettings(), name)
    return Knob(name=name, kind="integer", help=help, default=default, low=low, high=high, unit=unit)


def _number(name: str, help: str, low: float, high: float, unit: str = "") -> Knob:
    default = getattr(CoreSettings(), name)
    return Knob(name=name, kind="number", help=help, default=default, low=low, high=high, unit=unit)


def _choice(name: str, help: str, choices: tuple[str, ...]) -> Knob:
    default = getattr(CoreSettings(), name)
    return Knob(name=name, kind="choice", help=help, default=default, choices=choices)


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        _switch("pool", "keep free blocks in several queues; off = stock's block pool, without pinning"),
        _switch("pinning", "keep sliding windows where a later prompt can resume; off = stock's retention"),
        _switch("rows", "send sampled tokens from worker to scheduler as one array"),
        _switch("steady", "take a short path through steps that only decode"),
        _switch(
            "empty_blocks", "use one immutable empty block list instead of a new one per request and step"
        ),
        _switch("freeze", "freeze the heap of the processes that vLLM leaves unfrozen"),
        _switch(
            "front_end",
            "send plain outputs from EngineCore to AsyncLLM as columns, and wake only callers that wait",
        ),
        _choice("policy", "which free block is evicted next", (AUTO, *POLICIES)),
        _integer(
            "pin_window",
            "tokens kept before a point where a hit can end (0 = the layer's window)",
            0,
            1 << 20,
            "tokens",
        ),
        _integer(
            "min_drop",
            "keep the windows before the slack only if a step computes at least this many blocks",
            0,
            1 << 20,
            "blocks",
        ),
        _integer(
            "slack", "let a prompt resume up to this far before an earlier prompt's end", 0, 1 << 20, "tokens"
        ),
        _integer(
            "windows",
            "extra windows that end at the last multiples of slack, 2x slack, 4x slack .. before the slack",
            0,
            32,
            "windows",
        ),
        _switch("output_window", "keep the last window of the output too (the next turn resumes there)"),
        _number(
            "reuse_bonus_s",
            "two_class: a reused block goes before a block used once only if it is older by more than this",
            0.0,
            1e9,
            "s",
        ),
        _number(
            "ghost_factor",
            "two_class: evicted hashes that are remembered (1 = as many as the pool has blocks)",
            0.0,
            64.0,
            "pool sizes",
        ),
        _integer(
            "gc_threshold0", "gc.set_threshold's first value in EngineCore (0 = leave)", 0, 1 << 31, "objects"
        ),
        _integer("gc_threshold1", "gc.set_threshold's second value (0 = leave)", 0, 1 << 31, "collections"),
        _integer("gc_threshold2", "gc.set_threshold's third value (0 = leave)", 0, 1 << 31, "collections"),
        _switch("collect_at_wait", "collect garbage while EngineCore waits for requests or for the model"),
        _switch(
            "whole_states",
            "Mamba-2 on the CPU: end prefill chunks where a state is kept (`packed` implies it)",
        ),
        _switch(
            "packed",
            "hybrid models: small blocks; the attention pages of all layers together hold the states",
        ),
        _integer("states_per_block", "states that a packed block has room for", 1, 1024, "states"),
        _switch(
            "strict",
            "load every part that is asked for, or none; off = all except parts whose vLLM code changed",
        ),
    )
}


def parse(mapping: Mapping[str, object], base: CoreSettings | None = None) -> CoreSettings:
    """Return settings with these names and values (text accepted); the others come from `base` or the defaults."""
    values: dict[str, Any] = {**(base or CoreSettings()).to_dict()}  # `read` gives each the type of its field
    for name, value in mapping.items():
        key = name.removeprefix("core.")
        if key in GONE:
            continue
        if key not in KNOBS:
            hint = f"{did_you_mean(key, KNOBS)}settings are: {', '.join(KNOBS)}"
            raise UsageError(f"core has no setting {key!r}", hint)
        if key == "policy" and value in GONE_POLICIES:
            raise UsageError(f"core.policy={value} is gone", f"core.policy takes {KNOBS[key].legal}")
        values[key] = KNOBS[key].read(value)
    return CoreSettings(**values)


def of_an_old_run(mapping: Mapping[str, Value]) -> dict[str, Value]:
    """Return the recorded settings that this version has; a removed policy is left out, so that the default applies."""
    return {
        name: value
        for name, value in mapping.items()
        if name not in GONE and (name != "policy" or value not in GONE_POLICIES)
    }


def from_environment(environ: Mapping[str, str] | None = None) -> CoreSettings | None:
    """Return the settings in the KVTUNE_* variables, or None if vLLM runs without the core.

    KVTUNE_SET overrides the recipe, the recipe overrides the defaults, KVTUNE_CORE=stock overrides all.
    """
    environ = os.environ if environ is None else environ
    core, recipe = environ.get("KVTUNE_CORE", ""), environ.get("KVTUNE_RECIPE", "")
    if core not in ("", "stock", "kvtune"):
        raise UsageError(f"KVTUNE_CORE={core!r} is not a core", "KVTUNE_CORE takes kvtune or stock")
    if core == "stock" or not (core or recipe):
        return None
    settings = _of_recipe(Path(recipe)) if recipe else CoreSettings()
    text = environ.get("KVTUNE_SET", "")
    if not text:
        return settings
    try:
        assigned = json.loads(text)
    except ValueError as error:
        raise UsageError(f"KVTUNE_SET is not JSON: {error}", 'write it as {"pin_window": 1024}') from error
    if not isinstance(assigned, dict):
        raise UsageError("KVTUNE_SET is not a JSON object", 'write it as {"pin_window": 1024}')
    return parse(assigned, settings)


def _of_recipe(path: Path) -> CoreSettings:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"recipe {path}: {error.strerror}", "KVTUNE_RECIPE names a recipe file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"recipe {path} is not TOML: {error}", "see recipes/ for examples") from error
    table = raw.get("core", {})
    if not isinstance(table, dict):
        raise UsageError(f"recipe {path}: core is not a table", "write the core's settings under [core]")
    if table.get("policy") in GONE_POLICIES:
        raise UsageError(gone(path, table["policy"]), tune_again(raw))
    return parse(table)


def gone(path: Path, policy: object) -> str:
    """Return the message about a recipe whose eviction policy was removed."""
    return f"recipe {path}: its order of eviction, {policy}, is gone"
