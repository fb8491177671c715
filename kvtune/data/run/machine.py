"""What every recorder of runs states alike: kvtune, Python and the machine. Linux; what cannot be read stays empty."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

import psutil

from kvtune import __version__
from kvtune.base.cpu import avx512_bf16
from kvtune.base.masking import without_secrets
from kvtune.data.run.types import HostInfo


class Origin(TypedDict):
    """The fields of a Header that do not depend on what was measured."""

    kvtune: str
    python: str
    host: HostInfo
    command: list[str]
    state: Literal["complete", "partial"]
    why: str


def origin(command: Sequence[str], why: str) -> Origin:
    """Return these fields of a run made here and now. `why`: why the run ended early, or ""."""
    return {
        "kvtune": __version__,
        "python": platform.python_version(),
        "host": this_host(),
        "command": without_secrets(command),
        "state": "partial" if why else "complete",
        "why": why,
    }


def this_host() -> HostInfo:
    return HostInfo(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=int(psutil.virtual_memory().total),
        os=platform.platform(),
        avx512_bf16=avx512_bf16(),
    )


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()
