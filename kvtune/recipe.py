"""A recipe: settings that were found for one model on one class of device, with the evidence. TOML, data only.

Tables: [recipe] (model, device, vllm, kvtune, status), [engine] (vLLM's own names), [core] (kvtune core settings),
[evidence] (runs, baseline, ratios, intervals, hashes). Nothing in a recipe is executed.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from kvtune.errors import UsageError

Scalar = str | int | float | bool


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the recipe is for. status: confirmed (on the engine), simulated, or hand-written."""

    model: str
    device: str
    vllm: str
    kvtune: str
    status: str = "hand-written"
    note: str = ""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    recipe: About
    engine: dict[str, Scalar] = {}
    core: dict[str, Scalar] = {}
    evidence: dict[str, Any] = {}


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe file; UsageError names the file and the field."""
    try:
        raw = tomllib.loads(path.read_text())
    except FileNotFoundError as error:
        raise UsageError(
            f"no recipe file {path}", "`kvtune recipe list` shows the recipes at hand"
        ) from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(
            f"{path} is not readable TOML: {error}", "repair the file, or write it anew"
        ) from error
    try:
        return msgspec.convert(raw, Recipe)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{path}: {error}", "a recipe has [recipe], [engine], [core] and [evidence]"
        ) from error


def engine_flags(recipe: Recipe) -> list[str]:
    """[engine] as flags of vLLM's command line: `block_size = 32` -> `--block-size 32`, booleans as on/off flags."""
    flags: list[str] = []
    for name, value in recipe.engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", str(value)]
    return flags
