"""Checks what an engine needs: room in /dev/shm; on a GPU a driver, a C compiler, Python's headers. CLI's process.

Without them vLLM fails minutes later, after it has loaded the weights. So `doctor` reports what is missing, and
`profile` and `serve` refuse before the engine starts.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from kvtune.base import children
from kvtune.base.errors import EXIT_USAGE, KvtuneError
from kvtune.base.files import home_folder
from kvtune.base.units import size
from kvtune.data.flags import flag_value
from kvtune.lab.setup.offload_flags import GIB, SIZE
from kvtune.lab.setup.platform import Gpu, gpus
from kvtune.lab.setup.resolve import ranks

DRIVERS = {"13": 580, "12": 525}
"""The oldest driver that works with each major version of CUDA."""

COMPILERS = ("gcc", "clang")
"""Compilers that Triton looks for, unless CC names another."""


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that is missing, and what to do about it."""

    topic: str
    text: str
    hint: str


def lacks(seen_gpus: Sequence[Gpu]) -> Iterator[Lack]:
    yield from old_drivers(seen_gpus)
    yield from toolchain()


def old_drivers(seen_gpus: Sequence[Gpu]) -> Iterator[Lack]:
    needed = DRIVERS.get(cuda_major())
    for gpu in seen_gpus:
        major = gpu.driver.partition(".")[0]
        if needed and major.isdigit() and int(major) < needed:
            yield Lack(
                "device",
                f"driver {gpu.driver} is too old for CUDA {cuda_major()}, which torch needs: "
                f"it takes {needed} or newer",
                "update NVIDIA's driver",
            )


def cuda_major() -> str:
    """Return the major version of CUDA that torch was installed with; "" if it has none."""
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        try:
            return importlib.metadata.version(name).partition(".")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def toolchain() -> Iterator[Lack]:
    """Yield what is missing for compiling: Triton needs a C compiler and Python's headers at its first use."""
    named = os.environ.get("CC")
    if not any(children.program(name) for name in ((named,) if named else COMPILERS)):
        yield Lack(
            "compiler",
            f"no C compiler ({f'CC={named}' if named else ' or '.join(COMPILERS)}): Triton needs one at its first use",
            "install gcc (Debian: `apt-get install gcc`), or name a compiler in CC",
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        yield Lack(
            "compiler",
            f"there is no {header}: Triton compiles against Python's headers at its first use",
            "install them (Debian: `apt-get install python3-dev`)",
        )


def triton_has_compiled() -> bool:
    """Whether Triton's cache has code that an earlier engine of this user compiled: no compiler is needed then."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or (home_folder() or Path("/")) / ".triton" / "cache")
    try:
        return any(folder.iterdir())
    except OSError:
        return False


def check_gpu_needs(*, cpu_build: bool) -> None:
    """Raise KvtuneError if a GPU engine cannot start here. Does nothing if vLLM is built for the CPU."""
    if cpu_build:
        return
    lacking = [*old_drivers(gpus()), *(() if triton_has_compiled() else toolchain())]
    if lacking:
        raise KvtuneError(lacking[0].text, lacking[0].hint, EXIT_USAGE)


FOLDER = Path("/dev/shm")
NEEDED_BYTES = 240 << 20
"""Size of the larger queue between EngineCore and a worker (10 chunks of 24 MiB): vLLM needs this much free."""


def check_shared_memory(words: Sequence[str], *, cpu_build: bool) -> None:
    """Raise KvtuneError if /dev/shm has too little room for an engine with these flags."""
    # On one GPU the worker runs inside EngineCore. A GPU engine's tier is there in full size from the start.
    queues = NEEDED_BYTES if cpu_build or ranks(words) > 1 else 0
    tier = 0 if cpu_build else int(float(flag_value(words, SIZE) or 0) * GIB)
    if not queues and not tier:
        return
    try:
        free = shutil.disk_usage(FOLDER).free
    except OSError:
        free = 0
    if free >= queues + tier:
        return
    if tier:
        what = f"--{SIZE} {flag_value(words, SIZE)} is a file there on a GPU, and needs {size(queues + tier)}"
    else:
        engine = "the CPU engine" if cpu_build else "an engine on several GPUs"
        what = f"{engine} needs {queues >> 20} MiB for its message queues"
    room = ceil((queues + tier) / GIB) + 1
    raise KvtuneError(
        f"{FOLDER} has {free >> 20} MiB free: {what}",
        f"in a container: `docker run --shm-size={room}g` or --ipc=host"
        + ("; else a smaller tier" if tier else "")
        + "; `--on sim` needs none",
        EXIT_USAGE,
    )
