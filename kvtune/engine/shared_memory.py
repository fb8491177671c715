"""Checks, before an engine starts, that /dev/shm has room for what vLLM keeps there. In the CLI's process."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from kvtune.engine.flags import flag_value
from kvtune.engine.offload_flags import GIB, SIZE
from kvtune.engine.resolve import ranks
from kvtune.errors import EXIT_USAGE, KvtuneError
from kvtune.units import size

FOLDER = Path("/dev/shm")
NEEDED_BYTES = 240 << 20
"""Size of the larger queue between EngineCore and a worker (10 chunks of 24 MiB): vLLM needs this much free."""


def queues_bytes(words: Sequence[str], *, cpu_build: bool) -> int:
    """Return the bytes of the message queues: 0 on one GPU, where the worker runs inside EngineCore."""
    return NEEDED_BYTES if cpu_build or ranks(words) > 1 else 0


def tier_bytes(words: Sequence[str], *, cpu_build: bool) -> int:
    """Return the bytes of a host-memory tier: a GPU engine keeps it in /dev/shm, in full size from the start."""
    return 0 if cpu_build else int(float(flag_value(words, SIZE) or 0) * GIB)


def check_shared_memory(words: Sequence[str], *, cpu_build: bool) -> None:
    """Raise KvtuneError if /dev/shm has too little room for an engine with these flags."""
    queues, tier = (part(words, cpu_build=cpu_build) for part in (queues_bytes, tier_bytes))
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
