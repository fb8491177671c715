"""CPU features that change vLLM's decisions. Any process.

With AVX-512 BF16, vLLM's CPU platform keeps recurrent states in float32 whatever the model's data type is, which
doubles the size of state pages and of blocks. To reproduce another machine's block sizes, `KVTUNE_AVX512_BF16=0|1`
overrides the detected feature, here and in the vLLM that kvtune starts (plugin/vllm/cpu_flags.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from kvtune.base.errors import UsageError

VARIABLE = "KVTUNE_AVX512_BF16"
CPUINFO = Path("/proc/cpuinfo")


def forced() -> bool | None:
    """Return the value of KVTUNE_AVX512_BF16, or None if it is not set. UsageError if it is neither 0 nor 1."""
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise UsageError(
            f"{VARIABLE}={value!r} is neither 0 nor 1", f"unset {VARIABLE} to use what the CPU has"
        )
    return value == "1" if value else None


def avx512_bf16() -> bool:
    """Whether this CPU has AVX-512 BF16; KVTUNE_AVX512_BF16 overrides what the CPU reports."""
    answer = forced()
    return "avx512_bf16" in flags() if answer is None else answer


def flags() -> frozenset[str]:
    """Return the CPU features that the kernel lists; empty if it lists none (not Linux, not x86)."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").partition(":")[2].split())
