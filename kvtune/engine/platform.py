"""Finds the platform of the engines that kvtune starts or replays here. Asks nvidia-smi, not vLLM.

Runs in the CLI's process.
"""

from __future__ import annotations

from kvtune.engine.nvidia import gpus
from kvtune.engine.resolve import installed_for
from kvtune.vllm.platforms import LARGE_GPU, MIB, Platform, cpu


def here() -> Platform:
    """Return the platform of the installed vLLM; without memory size and capability if nvidia-smi lists no GPU."""
    if installed_for() == "cpu":
        return cpu()
    first = next(iter(gpus()), None)
    if first is None:
        return Platform("cuda", "a GPU")
    return Platform("cuda", first.name, first.total * MIB, first.capability)


def engines(like: Platform | None = None, *, timed: bool = False) -> Platform:
    """Return the platform whose defaults the engines use: `like`, that of --like-device, else this machine's.

    `timed`: the device is simulated. On a machine without a GPU, the platform is then a large GPU.
    """
    if like is not None:
        return like
    found = here()
    return LARGE_GPU if timed and found.kind == "cpu" else found
