"""Processes that still live, in tests that other tests' processes come and go beside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil


def living(pids: Iterable[int]) -> list[int]:
    """Those that are neither gone nor waiting to be collected by their parent, asked one at a time."""
    still_alive: list[int] = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end between two questions
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                still_alive.append(pid)
    return still_alive
