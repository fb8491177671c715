"""The platform of the engines that kvtune starts or replays here. The command's process; asks nvidia-smi, not vLLM."""

from __future__ import annotations

from kvtune.engine.nvidia import gpus
from kvtune.engine.resolve import installed_for
from kvtune.vllm.platforms import LARGE_GPU, MIB, Platform, cpu, device


def here() -> Platform:
    """The platform of the installed vLLM. If nvidia-smi lists no GPU, vLLM finds none either."""
    if installed_for() == "cpu":
        return cpu()
    first = next(iter(gpus()), None)
    if first is None:
        return Platform("cuda", "a GPU")
    return Platform("cuda", first.name, first.total * MIB, first.capability)


def engines(like_device: str, *, timed: bool = False) -> Platform:
    """The platform whose defaults engines take: --like-device's, else this machine's.

    `timed`: the device is simulated; if this machine has no GPU, it stands for a large one.
    """
    if like_device:
        return device(like_device)
    found = here()
    return LARGE_GPU if timed and found.kind == "cpu" else found
