"""A recipe: tuned settings for one model on one class of device, with their evidence. TOML, data only.

Tables: [recipe] (model, device, vllm, kvtune, status, core, checksum), [engine] (vLLM's names), [core] (the settings of
kvtune's core; a recipe with core = "stock" has none and needs no kvtune), [evidence]
(workload, baseline, runs, ratios, intervals). Nothing in a recipe is executed. kvtune writes a checksum of all other
fields; a recipe without a checksum must have status "hand-written".
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvtune.base.bounded import MOST_TOML, decode_toml
from kvtune.base.errors import UsageError, reason
from kvtune.base.files import explained, read_regular, replacing
from kvtune.data.file_flags import written
from kvtune.data.knobs import DRAFTS, ENGINE, TIER

Scalar = str | int | float | bool
Status = Literal["confirmed", "simulated", "hand-written"]


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recipe's model, device and versions. `device` and `device_name` are the engine's names, `model` the user's."""

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
    core: Literal["kvtune", "stock"] = "kvtune"
    created: str = ""
    note: str = ""


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    recipe: About
    engine: dict[str, Scalar] = {}
    core: dict[str, Scalar] = {}
    evidence: dict[str, Any] = {}

    @property
    def knobs(self) -> dict[str, Scalar]:
        """Its settings, of vLLM and of the core."""
        return {**self.engine, **self.core}


class FigureEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of stock vLLM (`baseline`) and of the recipe, with the difference as `kvtune compare` computes it."""

    baseline: float | None = None
    recipe: float | None = None
    difference: float | None = None
    relative: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str = "no difference shown"


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of [evidence] and their types. `Recipe` keeps the table as read, because the checksum covers it."""

    objective: str = ""
    workload: str = ""
    seed: int = 0
    workload_hash: str = ""
    engine_args: list[str] = []
    block_tokens: int = 0
    dummy: bool = False
    slo: dict[str, float] = {}
    engine_on: str = ""
    runs: list[str] = []
    baseline_runs: list[str] = []
    figures: dict[str, FigureEvidence] = {}
    simulated: float | None = None
    simulated_baseline: float | None = None


def read_recipe(path: Path) -> Recipe:
    """Read and check a recipe file. Raise UsageError, which names the file and the field, if it is not valid."""
    try:
        raw = decode_toml(read_regular(path, MOST_TOML))
    except FileNotFoundError as error:
        raise UsageError(f"no recipe file {path}", "`kvtune recipe list` shows all recipes") from error
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} is not readable TOML: {reason(error)}",
            "repair the file, or write it again",
        ) from error
    try:
        recipe = msgspec.convert(raw, Recipe)
        msgspec.convert(recipe.evidence, Evidence)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{path}: {reason(error)}", "a recipe has [recipe], [engine], [core] and [evidence]"
        ) from error
    check_engine_settings(recipe.engine, str(path), "[engine]")
    about = recipe.recipe
    if about.core == "stock" and recipe.core:
        raise UsageError(
            f'{path}: [recipe] core is "stock", but [core] has settings',
            'remove one: [core] is for core = "kvtune"',
        )
    _check_text(about, path)
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


def check_engine_settings(settings: Mapping[str, Scalar], where: str, part: str) -> None:
    """Raise UsageError for a setting that is not in ENGINE or whose value is not legal.

    `where`, `part`: the file and its part with the settings, such as `[engine]`, for the message.
    """
    for name, value in settings.items():
        if name not in ENGINE:
            raise UsageError(
                f"{where}: {ascii(name)[1:-1]} is not allowed in {part}",
                f"it takes {', '.join(ENGINE)}",
            )
        if not ENGINE[name].is_legal(value):
            raise UsageError(
                f"{where}: {name} = {_value(value)} is not allowed in {part}",
                f"{name} takes {ENGINE[name].legal}",
            )


def _check_text(about: About, path: Path) -> None:
    """Raise UsageError for text with a control character: after a line feed, it could look like kvtune's output."""
    for name, text in msgspec.structs.asdict(about).items():
        if not text.isprintable():
            raise UsageError(
                f"{path}: [recipe] {name} = {text!a} has a character that no line of text has",
                "remove it from the file, if the recipe is from someone you trust",
            )


def checksum(recipe: Recipe) -> str:
    """Return the checksum of the recipe without its field `checksum`."""
    bare = msgspec.structs.replace(recipe, recipe=msgspec.structs.replace(recipe.recipe, checksum=""))
    plain = msgspec.to_builtins(bare)
    if not bare.recipe.state_dtype:  # so that a recipe without this field keeps its checksum
        del plain["recipe"]["state_dtype"]
    if bare.recipe.core == "kvtune":
        del plain["recipe"]["core"]
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def write_recipe(recipe: Recipe, path: Path, head: str = "") -> None:
    """Write the recipe with its checksum, whole or not at all. `head`: a comment for the file's first line."""
    sealed = msgspec.structs.replace(
        recipe, recipe=msgspec.structs.replace(recipe.recipe, checksum=checksum(recipe))
    )
    with explained(path, "choose another place", "the recipe"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part:
            first = f"# {head}\n\n" if head else ""
            tables = msgspec.to_builtins(sealed)
            if sealed.recipe.core == "kvtune":  # so that an older kvtune reads it
                del tables["recipe"]["core"]
            else:
                del tables["core"]
            part.write((first + to_toml(tables)).encode())


def to_toml(tables: Mapping[str, object]) -> str:
    """Return nested tables of scalars and lists of scalars as TOML. None values are omitted."""
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
    """Return a setting as people write it: `true`, `0.5`, `lru`."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_vllms_names(engine: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return engine settings as vLLM names them: a tier's become `kv_transfer_config`, drafts `speculative_config`."""
    tier = {name: value for name, value in engine.items() if name in TIER}
    named = {name: value for name, value in engine.items() if name not in (*tier, DRAFTS)}
    if engine.get(DRAFTS):
        named["speculative_config"] = json.dumps(
            {"method": "mtp", DRAFTS: engine[DRAFTS]}, separators=(",", ":")
        )
    if tier:
        named["kv_transfer_config"] = json.dumps({"kv_connector_extra_config": tier}, separators=(",", ":"))
    return named


def engine_flags(engine: Mapping[str, Scalar]) -> list[str]:
    """Return engine settings as vLLM's flags, such as `--block-size 32`; booleans become `--x` or `--no-x`."""
    return written({name.replace("_", "-"): value for name, value in in_vllms_names(engine).items()})


def differences(
    recipe: Recipe,
    *,
    vllm: str = "",
    kvtune: str = "",
    state_dtype: str = "",
) -> list[str]:
    """Return the recipe's versions that differ from those given, one text each. Empty versions are not compared."""
    about = recipe.recipe
    pairs = (
        ("vLLM", about.vllm.split("+", 1)[0], vllm.split("+", 1)[0]),
        ("kvtune", about.kvtune, kvtune),
        ("recurrent states in", about.state_dtype, state_dtype),
    )
    return [
        f"{name} {recorded} (here: {here})"
        for name, recorded, here in pairs
        if recorded and here and recorded != here
    ]
