"""A container's limits of cores and memory, from cgroup v2 or v1. Any process."""

from __future__ import annotations

from math import ceil
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cpu_limit() -> int | None:
    """The cores that this process's container may use; None: no limit, or unknown."""
    quota, period = _words("cpu.max")
    if not quota:  # v1
        quota, period = _words("cpu/cpu.cfs_quota_us")[0], _words("cpu/cpu.cfs_period_us")[0]
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return max(1, ceil(int(quota) / int(period)))


def memory_limit_bytes() -> int | None:
    """The memory that this process's container may use; None: no limit, or unknown."""
    limit = _words("memory.max")[0] or _words("memory/memory.limit_in_bytes")[0]
    if not limit.isdigit() or int(limit) >= 1 << 60:  # v1 writes no limit as a huge number
        return None
    return int(limit)


def memory_used_bytes() -> int:
    """The memory that this process's container uses; 0 where unknown."""
    used = _words("memory.current")[0] or _words("memory/memory.usage_in_bytes")[0]
    return int(used) if used.isdigit() else 0


def _words(name: str) -> tuple[str, str]:
    """The first two words of a file of the control group."""
    try:
        words = (CGROUP / name).read_text().split()
    except OSError:
        words = []
    return (words[0] if words else "", words[1] if len(words) > 1 else "")
