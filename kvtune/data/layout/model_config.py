"""A model's config.json: of a built-in model, a folder, or a name on the hub. Imports no vLLM."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtune.base.errors import UsageError, reason
from kvtune.base.files import read_json
from kvtune.data.layout.config import shape_of
from kvtune.data.layout.models import builtin
from kvtune.data.layout.plan import ModelShape

FILE = "config.json"
NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""A name on the hub."""
MOST_BYTES = 16 << 20
"""Size limit of the file. The largest ones, which list every quantized layer, have a few hundred KB."""
PLAUSIBLE = (
    (re.compile(r"(?<!per_)layers?(_\w*(types?|pattern|freq))?$|^(n|num)_blocks$|^depth$"), 1_000),
    (re.compile(r"experts?$"), 10_000),
    (re.compile(r"position_embeddings$|^model_max_length$"), 1 << 27),
)
"""What vLLM makes one by one, and most of it. The largest models have 126 layers, 896 experts, 10 M positions."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A config.json. If it could not be read, `fields` is empty and `why` gives the reason."""

    fields: dict[str, Any] = field(default_factory=dict)
    why: str = ""


def model_config(model: str, revision: str | None = None) -> ModelConfig:
    """Read a model's config.json as vLLM does.

    For a name: from the hub's cache (HF_HOME), else from the hub, unless HF_HUB_OFFLINE is set.
    """
    folder = builtin(model) or Path(model).expanduser()
    path = folder / FILE
    if not folder.exists():
        config = _on_hub(model, revision)
        if isinstance(config, str):
            return ModelConfig(why=config)
        path = config
    return config_at(path)


def config_at_hand(model: str, *, folders: bool) -> ModelConfig:
    """Read a model's config.json without a network: of a built-in name, the hub's cache, a folder if allowed."""
    folder = builtin(model) or (Path(model) if folders and Path(model).is_absolute() else None)
    if folder is not None:
        return config_at(folder / FILE)
    if not NAME.fullmatch(model):
        return ModelConfig(why=f"{model} is no name of a model")
    try:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(model, FILE)
    except (ImportError, OSError, ValueError) as error:
        return ModelConfig(why=reason(error))
    return config_at(Path(cached)) if isinstance(cached, str) else ModelConfig(why=f"{model} is not cached")


def config_at(path: Path) -> ModelConfig:
    """Read a config.json, as vLLM does: `Infinity` and `NaN` are numbers in it."""
    try:
        fields = read_json(path, MOST_BYTES)
    except OSError as error:
        return ModelConfig(why=f"{path} cannot be read: {reason(error)}")
    except ValueError as error:
        return ModelConfig(why=f"{path} is not JSON: {reason(error)}")
    if not isinstance(fields, dict):
        return ModelConfig(why=f"{path} is no JSON object")
    if wrong := _implausible(fields):
        return ModelConfig(why=f"{path}: {wrong}")
    return ModelConfig(fields, "" if fields else f"{path} has no fields")


def _implausible(fields: dict[str, Any]) -> str:
    """Return which field counts more layers or experts than a model has, in the parts of the config, too; else ""."""
    parts: list[Any] = [fields]
    while parts:
        part = parts.pop()
        if isinstance(part, list):
            parts += part
            continue
        for name, value in part.items() if isinstance(part, dict) else ():
            number = len(value) if isinstance(value, list) else value
            count = number if isinstance(number, int | float) else 0
            most = next((most for named, most in PLAUSIBLE if named.search(name)), math.inf)
            if count > most:
                shown = f"lists {count:,}" if isinstance(value, list) else f"is {value:,}"[:40]
                return f"field {name} {shown}, and a model has at most {most:,}"
            parts.append(value)
    return ""


def _on_hub(name: str, revision: str | None) -> Path | str:
    """Return the file in the hub's cache, or why it is not there."""
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError:
        return f"{name} is no folder, and huggingface_hub, which vLLM brings, is not installed"
    try:
        cached = try_to_load_from_cache(name, FILE, revision=revision)
        return Path(cached if isinstance(cached, str) else hf_hub_download(name, FILE, revision=revision))
    except (
        OSError,
        ValueError,
    ) as error:  # no network, HF_HUB_OFFLINE, no such model, no access, no name at all
        first_line = next(
            (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
        )
        return f"{FILE} of {name} is not in the hub's cache, and the hub did not give it: {first_line}"


def shape_at_hand(model: str, folders: bool) -> ModelShape | None:
    """Return the shape of a model whose config.json is on this machine, and whose family the arithmetic knows."""
    fields = config_at_hand(model, folders=folders).fields
    try:
        return shape_of(fields, model) if fields else None
    except UsageError:
        return None
