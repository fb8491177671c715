"""Checks what a GPU engine needs: a driver, a C compiler, Python's headers. In the CLI's process.

Without them vLLM fails minutes later, after it has loaded the weights. So `doctor` reports what is missing, and
`profile` and `serve` refuse before the engine starts.
"""

from __future__ import annotations

import importlib.metadata
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtune import children
from kvtune.engine.platform import Gpu, gpus
from kvtune.errors import EXIT_USAGE, KvtuneError
from kvtune.files import home_folder

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


def lacks(found: Sequence[Gpu]) -> Iterator[Lack]:
    yield from old_drivers(found)
    yield from toolchain()


def old_drivers(found: Sequence[Gpu]) -> Iterator[Lack]:
    needed = DRIVERS.get(cuda_major())
    for gpu in found:
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
    found = [*old_drivers(gpus()), *(() if triton_has_compiled() else toolchain())]
    if found:
        raise KvtuneError(found[0].text, found[0].hint, EXIT_USAGE)
