"""Finds the platform of the engines that kvtune starts or replays here. Asks nvidia-smi, not vLLM.

Runs in the CLI's process.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtune.base import children
from kvtune.data.platforms import LARGE_GPU, MIB, Platform, cpu
from kvtune.lab.setup.resolve import installed_for

FIELDS = ("name", "memory.total", "memory.used", "driver_version", "compute_cap")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `total`, `used`: memory in MiB. Figures that nvidia-smi does not report are 0, `capability` (0, 0)."""

    name: str
    total: int = 0
    used: int = 0
    driver: str = ""
    capability: tuple[int, int] = (0, 0)


def gpus() -> list[Gpu]:
    """Return the GPUs; [] without a GPU or without nvidia-smi."""
    smi = children.program("nvidia-smi")
    if smi is None:
        return []
    query = [smi, f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
    done = children.answer(query, timeout_s=30)
    return [_gpu(line) for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def _gpu(row: str) -> Gpu:
    name, *rest = (field.strip() for field in row.split(","))
    total, used, driver, capability = (*rest, *[""] * len(FIELDS))[: len(FIELDS) - 1]
    major, _, minor = capability.partition(".")
    return Gpu(name, _number(total), _number(used), driver, (_number(major), _number(minor)))


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


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
    platform = here()
    return LARGE_GPU if timed and platform.kind == "cpu" else platform
