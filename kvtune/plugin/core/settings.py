"""Reads the core's settings from text, recipes and the environment. Used by the CLI, the tuner and vLLM's processes.

The settings themselves stand in `kvtune/data/knobs.py`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtune.base.bounded import MOST_TOML, decode_json, decode_toml
from kvtune.base.errors import UsageError, did_you_mean, reason
from kvtune.base.files import read_regular
from kvtune.data.knobs import CORE, CoreSettings


def without(settings: CoreSettings, switches: Collection[str]) -> CoreSettings:
    """Return the settings with these switches off."""
    off: dict[str, Any] = dict.fromkeys(switches, False)
    return replace(settings, **off)


def parse(mapping: Mapping[str, object], base: CoreSettings | None = None) -> CoreSettings:
    """Return settings with these names and values (text accepted); the others come from `base` or the defaults."""
    values: dict[str, Any] = {**(base or CoreSettings()).to_dict()}  # `read` gives each the type of its field
    for name, value in mapping.items():
        key = name.removeprefix("core.")
        if key not in CORE:
            hint = f"{did_you_mean(key, CORE)}settings are: {', '.join(CORE)}"
            raise UsageError(f"core has no setting {key!r}", hint)
        values[key] = CORE[key].checked(value)
    return CoreSettings(**values)


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
    if settings is None and not core:
        return None
    settings = settings or CoreSettings()
    text = environ.get("KVTUNE_SET", "")
    if not text:
        return settings
    try:
        assigned = decode_json(text)
    except ValueError as error:
        raise UsageError(f"KVTUNE_SET is not JSON: {error}", 'write it as {"pin_window": 1024}') from error
    if not isinstance(assigned, dict):
        raise UsageError("KVTUNE_SET is not a JSON object", 'write it as {"pin_window": 1024}')
    return parse(assigned, settings)


def _of_recipe(path: Path) -> CoreSettings | None:
    """Return the recipe's settings of the core; None for a recipe of stock vLLM."""
    try:
        raw = decode_toml(read_regular(path, MOST_TOML))
    except OSError as error:
        raise UsageError(f"recipe {path}: {reason(error)}", "KVTUNE_RECIPE names a recipe file") from error
    except ValueError as error:
        raise UsageError(f"recipe {path} is not TOML: {error}", "see recipes/ for examples") from error
    table = raw.get("core", {})
    if not isinstance(table, dict):
        raise UsageError(f"recipe {path}: core is not a table", "write the core's settings under [core]")
    about = raw.get("recipe")
    return None if isinstance(about, dict) and about.get("core") == "stock" else parse(table)
