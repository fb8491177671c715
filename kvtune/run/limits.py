"""What a container allows below what the machine has: cores and memory, by cgroup v2 or v1. Any process."""

from __future__ import annotations

from math import ceil
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cpu_limit() -> int | None:
    """Cores' worth of time that this process's container may use; None: no limit, or not known."""
    quota, period = _words("cpu.max")
    if not quota:  # v1
        quota, period = _words("cpu/cpu.cfs_quota_us")[0], _words("cpu/cpu.cfs_period_us")[0]
    if not (quota.isdigit() and period.isdigit() and int(period)):
        return None
    return max(1, ceil(int(quota) / int(period)))


def memory_limit_bytes() -> int | None:
    """Bytes that this process's container may hold; None: no limit, or not known."""
    limit = _words("memory.max")[0] or _words("memory/memory.limit_in_bytes")[0]
    if not limit.isdigit() or int(limit) >= 1 << 60:  # v1 says "none" by a huge number
        return None
    return int(limit)


def memory_used_bytes() -> int:
    """Bytes that this process's container holds; 0 where it is not known."""
    used = _words("memory.current")[0] or _words("memory/memory.usage_in_bytes")[0]
    return int(used) if used.isdigit() else 0


def _words(name: str) -> tuple[str, str]:
    """The first two words of a file of the control group."""
    try:
        found = (CGROUP / name).read_text().split()
    except OSError:
        found = []
    return (found[0] if found else "", found[1] if len(found) > 1 else "")
