"""The machine that a run ran on. Linux; anything that cannot be read stays empty."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from kvtune.run.cpu import avx512_bf16
from kvtune.run.types import HostInfo


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
