"""What this machine's CPU can do that vLLM's decisions depend on. Any process; imports nothing of ours.

With AVX-512 BF16, vLLM's CPU platform keeps recurrent states in float32 whatever the model's type is: the pages of
states double, and with them the blocks. `KVTUNE_AVX512_BF16=0|1` answers in the CPU's place, here and in the vLLM
that kvtune starts (core/cpu_flags.py): another machine's blocks on this one.
"""

from __future__ import annotations

import os
from pathlib import Path

from kvtune.errors import UsageError

VARIABLE = "KVTUNE_AVX512_BF16"
CPUINFO = Path("/proc/cpuinfo")


def forced() -> bool | None:
    """What KVTUNE_AVX512_BF16 says; None where it is not set. UsageError for anything but 0 and 1."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise UsageError(
            f"{VARIABLE}={value!r} is neither 0 nor 1", f"unset {VARIABLE} to ask the CPU itself"
        )
    return value == "1" if value else None


def avx512_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in AVX-512 registers, or is said to (`forced`)."""
    answer = forced()
    return "avx512_bf16" in flags() if answer is None else answer


def flags() -> frozenset[str]:
    """The CPU's features as the kernel names them; empty where it does not say (not Linux, not x86)."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())
