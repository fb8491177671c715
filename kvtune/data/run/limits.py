"""Limits of cores and memory: a container's, from cgroup v2 or v1, and what a run file may make kvtune build.

What a file asks for is estimated before it is built, and refused with the figure. Any process.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path

from kvtune.base.errors import TooLargeError
from kvtune.base.units import size

CGROUP = Path("/sys/fs/cgroup")

BLOCK_BYTES = 256
"""Memory of a KV block in vLLM's pool and in the core's queues: 146 bytes were measured, without its hash."""
ROW_BYTES = 12
"""Memory of a request in the batches of a timed device."""
PROMPT_SPANS = 8_000_000
"""Spans in all prompts of the workload that a run file names: they take 95 bytes each while it is hashed."""
PROMPT_TOKENS = 16 << 20
"""Tokens of its longest request: a hash for each of their blocks is kept."""
PATH_BLOCKS = 10_000_000
"""Blocks in all its prompts up to which a page has the bounds of every cache: they take 64 bytes each."""


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


def free_memory_bytes() -> int:
    """Return the memory that a new process can have, within the machine's and the container's limits."""
    import psutil

    free = int(psutil.virtual_memory().available)
    limit = memory_limit_bytes()
    return free if limit is None else max(0, min(free, limit - memory_used_bytes()))


def check_blocks(blocks: int) -> None:
    """Raise TooLargeError if a pool of that many KV blocks would take more than half of the free memory."""
    _check_free(f"a pool of {blocks:,} KV blocks", blocks, BLOCK_BYTES, "--num-gpu-blocks-override")


def check_rows(requests: int) -> None:
    """Raise TooLargeError if the rows of a simulated batch would take more than half of the free memory."""
    _check_free(f"a batch of {requests:,} requests", requests, ROW_BYTES, "--max-num-seqs")


def _check_free(what: str, number: int, each_bytes: int, flag: str) -> None:
    need, free = each_bytes * number, free_memory_bytes()
    if need > free // 2:
        raise TooLargeError(
            f"{what} takes {size(need)} of memory to simulate, and this machine has {size(free)} free",
            f"give {flag} at most {free // 2 // each_bytes:,}",
        )


def _words(name: str) -> tuple[str, str]:
    """Return the first two words of a cgroup file; "" for missing ones."""
    try:
        words = (CGROUP / name).read_text().split()
    except OSError:
        words = []
    return (words[0] if words else "", words[1] if len(words) > 1 else "")
