"""A container's limits of cores and memory, from cgroup v2 or v1. Any process."""

from __future__ import annotations

from math import ceil
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cpu_limit() -> int | None:
    """Return how many cores this process's container may use; None without a limit, or if unknown."""
    quota, period = _words("cpu.max")
    if not quota:  # v1
        quota, period = _words("cpu/cpu.cfs_quota_us")[0], _words("cpu/cpu.cfs_period_us")[0]
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return max(1, ceil(int(quota) / int(period)))


def memory_limit_bytes() -> int | None:
    """Return how much memory this process's container may use; None without a limit, or if unknown."""
    limit = _words("memory.max")[0] or _words("memory/memory.limit_in_bytes")[0]
    if not limit.isdigit() or int(limit) >= 1 << 60:  # cgroup v1 writes a huge number if there is no limit
        return None
    return int(limit)


def memory_used_bytes() -> int:
    """Return how much memory this process's container uses; 0 if unknown."""
    used = _words("memory.current")[0] or _words("memory/memory.usage_in_bytes")[0]
    return int(used) if used.isdigit() else 0


def _words(name: str) -> tuple[str, str]:
    """Return the first two words of a cgroup file; "" for missing ones."""
    try:
        words = (CGROUP / name).read_text().split()
    except OSError:
        words = []
    return (words[0] if words else "", words[1] if len(words) > 1 else "")
