"""Checks the devices of this machine: GPUs by nvidia-smi, or the CPU's cores. Imports neither vLLM nor torch."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Sequence

from kvtune.device.nvidia import Gpu, gpus
from kvtune.doctor.finding import Finding
from kvtune.engine.resolve import is_cpu_build
from kvtune.run.cpu import VARIABLE, avx512_bf16, forced
from kvtune.run.limits import cpu_limit

DRIVERS = {"13": 580, "12": 525}
"""The oldest driver that serves a major version of CUDA."""

TAKEN_SHARE = 0.92
"""What vLLM takes of a GPU's memory by default; it refuses to start where less is free."""


def gpu_findings(found: Sequence[Gpu]) -> Iterator[Finding]:
    for gpu in found:
        name, total, used, driver = gpu.name, gpu.total, gpu.used, gpu.driver
        yield Finding("ok", "device", f"{name}, {total:,} MiB, driver {driver}")
        if total and total - used < TAKEN_SHARE * total:
            share = max(0.05, (total - used) / total * 0.9)
            yield Finding(
                "warning",
                "device",
                f"{used:,} of the {total:,} MiB of {name} are in use: vLLM takes {100 * TAKEN_SHARE:.0f} % by default, "
                "and refuses to start where that is not free",
                f"end what uses it (`nvidia-smi`), or add `-- --gpu-memory-utilization {share:.2f}`, also beside "
                "--kv-cache-memory-bytes",
            )
        needed = DRIVERS.get(cuda_major())
        major = driver.partition(".")[0]
        if needed and major.isdigit() and int(major) < needed:
            yield Finding(
                "error",
                "device",
                f"driver {driver} is too old for CUDA {cuda_major()}, which torch needs: it takes {needed} or newer",
                "update NVIDIA's driver",
            )


def cuda_major() -> str:
    """The major version of CUDA that the installed torch brings; "" for none."""
    for name in ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12"):
        try:
            return importlib.metadata.version(name).partition(".")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def device_findings() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    allowed = cpu_limit()
    if found := gpus():
        yield from gpu_findings(found)
        if is_cpu_build():
            yield Finding(
                "warning",
                "device",
                "this vLLM is built for the CPU and does not use the GPU",
                "install kvtune[cuda] instead of kvtune[cpu]",
            )
    else:
        has = "with" if avx512_bf16() else "without"
        source = f" (set by {VARIABLE})" if forced() is not None else ""
        yield Finding("ok", "device", f"no NVIDIA GPU; CPU with {cores} cores, {has} AVX-512 BF16{source}")
        if allowed is not None and allowed < cores:
            yield Finding(
                "warning",
                "device",
                f"this container may use {allowed} of the {cores} cores, and vLLM starts a thread for each core",
                f"set OMP_NUM_THREADS={max(1, allowed - 1)} and VLLM_CPU_OMP_THREADS_BIND=nobind",
            )
        if min(cores, allowed or cores) < 2:
            yield Finding(
                "warning",
                "device",
                "EngineCore and the worker share one core",
                "give the engine at least two cores",
            )
