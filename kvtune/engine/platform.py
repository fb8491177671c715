"""The platform of the engines that kvtune starts or replays here. The command's process; asks nvidia-smi, not vLLM."""

from __future__ import annotations

from kvtune.engine.nvidia import gpus
from kvtune.engine.resolve import installed_for
from kvtune.vllm.platforms import LARGE_GPU, MIB, Platform, cpu, device


def here() -> Platform:
    """The platform of the installed vLLM. A GPU that nvidia-smi does not list is unknown to vLLM, too."""
    if installed_for() == "cpu":
        return cpu()
    first = next(iter(gpus()), None)
    if first is None:
        return Platform("cuda", "a GPU")
    return Platform("cuda", first.name, first.total * MIB, first.capability)


def engines(like_device: str, *, timed: bool = False) -> Platform:
    """The platform that engines are like: --like-device's, else this machine's.

    `timed`: the device is simulated, and stands for a large GPU where this machine has none.
    """
    if like_device:
        return device(like_device)
    found = here()
    return LARGE_GPU if timed and found.kind == "cpu" else found
