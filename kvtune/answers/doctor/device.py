"""Checks the devices of this machine: GPUs by nvidia-smi, or the CPU's cores. Imports neither vLLM nor torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from kvtune.answers.doctor.finding import Finding
from kvtune.base.cpu import VARIABLE, avx512_bf16, forced
from kvtune.data.run.limits import cpu_limit
from kvtune.lab.engine.gpu_needs import lacks, old_drivers
from kvtune.lab.setup.platform import Gpu, gpus
from kvtune.lab.setup.resolve import is_cpu_build

TAKEN_SHARE = 0.92
"""Share of a GPU's memory that vLLM takes by default. vLLM refuses to start if less is free."""


def gpu_findings(seen_gpus: Sequence[Gpu]) -> Iterator[Finding]:
    for gpu in seen_gpus:
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


def device_findings() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    allowed = cpu_limit()
    if seen_gpus := gpus():
        yield from gpu_findings(seen_gpus)
        missing = old_drivers(seen_gpus) if is_cpu_build() else lacks(seen_gpus)
        yield from (Finding("error", lack.topic, lack.text, lack.hint) for lack in missing)
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
