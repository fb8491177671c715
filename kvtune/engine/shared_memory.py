"""Checks, before an engine starts, that /dev/shm has room for vLLM's message queues. Launcher's process."""

from __future__ import annotations

import shutil
from pathlib import Path

from kvtune.errors import EXIT_USAGE, KvtuneError

FOLDER = Path("/dev/shm")
NEEDED_BYTES = 240 << 20
"""The larger queue between EngineCore and a worker (ten chunks of 24 MiB): vLLM refuses to start with less free."""


def check_shared_memory(cpu_build: bool) -> None:
    """KvtuneError where the CPU engine could not start: its worker is a separate process."""
    if not cpu_build:  # on one GPU the worker runs inside EngineCore
        return
    try:
        free = shutil.disk_usage(FOLDER).free
    except OSError:
        free = 0
    if free < NEEDED_BYTES:
        raise KvtuneError(
            f"{FOLDER} has {free >> 20} MiB free, the CPU engine's message queues need {NEEDED_BYTES >> 20} MiB",
            "in a container: `docker run --shm-size=1g` or --ipc=host; `--on sim` needs none",
            EXIT_USAGE,
        )
