"""A recipe: tuned settings for one model on one class of device, with their evidence. TOML, data only.

Tables: [recipe] (model, device, vllm, kvtune, status, checksum), [engine] (vLLM's names), [core] (the core's settings),
[evidence] (workload, baseline, runs, ratios, intervals). Nothing in a recipe is executed. Recipes that kvtune wrote
have a checksum over everything else; one without it must have status "hand-written".
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvtune.errors import UsageError
from kvtune.files import explained, replacing

Scalar = str | int | float | bool
Status = Literal["confirmed", "simulated", "hand-written"]

TIER_SETTINGS = (
    "eviction_policy",
    "blocks_per_chunk",
    "store_threshold",
    "offload_prompt_only",
    "max_tracker_size",
)
"""Settings of a tier of host memory that vLLM takes in --kv-transfer-config."""
TIER_POLICIES = ("lru", "arc", "kvtune")
"""Its eviction policies, by name: vLLM's, and kvtune's own."""
ENGINE_SETTINGS = (
    "block_size",
    "prefix_match_unit",
    "prefix_cache_retention_interval",
    "max_num_batched_tokens",
    "max_num_seqs",
    "prefill_schedule_interval",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
    "max_model_len",
    "enable_prefix_caching",
    "gpu_memory_utilization",
    "kv_offloading_size",
    "stream_interval",
    "api_server_count",
    *TIER_SETTINGS,
)
"""Settings allowed in [engine]: of the cache and the scheduler. A recipe cannot load code, files or plugins."""


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the recipe is for. `device` and `device_name` are the engine's names, `model` is the user's."""

    # First in the file, so that a truncated file is not taken for a hand-written one.
    checksum: str = ""
    model: str
    device: str
    vllm: str
    kvtune: str
    python: str = ""
    device_name: str = ""
    state_dtype: str = (
        ""  # of recurrent states, where it was measured; vLLM may choose another on another CPU
    )
    status: Status = "hand-written"
    created: str = ""
    note: str = ""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    recipe: About
    engine: dict[str, Scalar] = {}
    core: dict[str, Scalar] = {}
    evidence: dict[str, Any] = {}


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe file. UsageError names the file and the field."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no recipe file {path}", "`kvtune recipe list` shows all recipes") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(
            f"{path} is not readable TOML: {getattr(error, 'strerror', None) or error}",
            "repair the file, or write it again",
        ) from error
    try:
        recipe = msgspec.convert(raw, Recipe)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{path}: {error}", "a recipe has [recipe], [engine], [core] and [evidence]"
        ) from error
    unknown = [name for name in recipe.engine if name not in ENGINE_SETTINGS]
    if unknown:
        raise UsageError(
            f"{path}: {unknown[0]} is not allowed in [engine]", f"it takes {', '.join(ENGINE_SETTINGS)}"
        )
    _check_tier(recipe.engine, path)
    about = recipe.recipe
    if about.checksum and about.checksum != checksum(recipe):
        raise UsageError(
            f"{path} was changed or cut short after kvtune wrote it: its checksum does not match",
            'write it again, or remove `checksum` and set status = "hand-written" to use it as your own',
        )
    if not about.checksum and about.status != "hand-written":
        raise UsageError(
            f"{path}: [recipe] status is {about.status}, but there is no checksum",
            'set status = "hand-written": only recipes with kvtune\'s checksum can have another status',
        )
    return recipe


def _check_tier(engine: Mapping[str, Scalar], path: Path) -> None:
    legal: dict[str, tuple[Callable[[Scalar], bool], str]] = {
        "eviction_policy": (lambda value: value in TIER_POLICIES, f"one of {', '.join(TIER_POLICIES)}"),
        "blocks_per_chunk": (_whole_from(1), "a whole number from 1 up"),
        "store_threshold": (_whole_from(0), "a whole number from 0 up"),
        "offload_prompt_only": (lambda value: isinstance(value, bool), "true or false"),
        "max_tracker_size": (_whole_from(1), "a whole number from 1 up"),
    }
    for name in TIER_SETTINGS:
        is_legal, what = legal[name]
        if name in engine and not is_legal(engine[name]):
            raise UsageError(
                f"{path}: {name} = {_value(engine[name])} is not allowed in [engine]", f"{name} takes {what}"
            )


def _whole_from(least: int) -> Callable[[Scalar], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def checksum(recipe: Recipe) -> str:
    """Over everything but the checksum itself."""
    bare = msgspec.structs.replace(recipe, recipe=msgspec.structs.replace(recipe.recipe, checksum=""))
    plain = msgspec.to_builtins(bare)
    if not bare.recipe.state_dtype:  # older recipes do not have this field
        del plain["recipe"]["state_dtype"]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write it with its checksum, whole or not at all."""
    sealed = msgspec.structs.replace(
        recipe, recipe=msgspec.structs.replace(recipe.recipe, checksum=checksum(recipe))
    )
    with explained(path, "choose another place", "the recipe"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            part.write_text(to_toml(msgspec.to_builtins(sealed)), encoding="utf-8")


def to_toml(tables: Mapping[str, object]) -> str:
    """TOML of nested tables of scalars and lists of scalars, without None values and empty tables."""
    lines: list[str] = []
    _table(tables, "", lines)
    return "\n".join(lines).strip() + "\n"


def _table(table: Mapping[str, object], name: str, lines: list[str]) -> None:
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    values = {key: value for key, value in table.items() if key not in inner and value is not None}
    if name and (values or not inner):
        lines += ["", f"[{name}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items()]
    for key, value in inner.items():
        _table(value, f"{name}.{_key(key)}" if name else _key(key), lines)


def _key(text: str) -> str:
    plain = text.replace("-", "").replace("_", "")
    return text if plain.isascii() and plain.isalnum() else _value(text)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_value(item) for item in value)}]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def text_of(value: Scalar) -> str:
    """A setting as a person writes it: `true`, `0.5`, `lru`."""
    return (
        str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def in_vllms_names(engine: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Engine settings as vLLM's command line has them: those of a tier are one, `kv_transfer_config`, in JSON."""
    tier = {name: value for name, value in engine.items() if name in TIER_SETTINGS}
    named = {name: value for name, value in engine.items() if name not in tier}
    if tier:
        named["kv_transfer_config"] = json.dumps({"kv_connector_extra_config": tier}, separators=(",", ":"))
    return named


def engine_flags(engine: Mapping[str, Scalar]) -> list[str]:
    """Engine settings as vLLM's flags: `block_size = 32` is `--block-size 32`, booleans are `--x` and `--no-x`."""
    flags: list[str] = []
    for name, value in in_vllms_names(engine).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", "None" if value == "none" else str(value)]
    return flags


def differences(
    recipe: Recipe,
    *,
    model: str = "",
    vllm: str = "",
    device: str = "",
    kvtune: str = "",
    state_dtype: str = "",
) -> list[str]:
    """How the recipe differs from the place of its use, in words. Empty fields are not compared."""
    about = recipe.recipe
    pairs = (
        ("model", about.model, model),
        ("vLLM", about.vllm.split("+", 1)[0], vllm.split("+", 1)[0]),
        ("device", about.device, device),
        ("kvtune", about.kvtune, kvtune),
        ("recurrent states in", about.state_dtype, state_dtype),
    )
    return [
        f"{name} {recorded} (here: {here})"
        for name, recorded, here in pairs
        if recorded and here and recorded != here
    ]
