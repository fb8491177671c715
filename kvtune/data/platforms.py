"""Platforms that vLLM runs on, and its server's defaults on each. Plain data; any process.

`DEVICES` are those that `--like-device` names. `Default.source` is the place of a figure in vLLM's code;
tests/data/test_platforms.py compares the figures with vLLM's, with its platform forced.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from kvtune.base.cpu import avx512_bf16
from kvtune.base.errors import UsageError, did_you_mean
from kvtune.data.installed import installed_version, release

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Platform:
    """A device as vLLM sees it. `key`: its name for --like-device; "" for this machine's device.

    `float32_states`: vLLM keeps recurrent states in float32 whatever the model's type is.
    """

    kind: Literal["cpu", "cuda"]
    name: str
    memory_bytes: int = 0
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    float32_states: bool = False
    key: str = ""

    @property
    def runs_on(self) -> Literal["cpu", "gpu"]:
        return "cpu" if self.kind == "cpu" else "gpu"

    @property
    def title(self) -> str:
        return f"{self.name} (--like-device {self.key})" if self.key else self.name


@dataclass(frozen=True, slots=True)
class Default:
    """A value that vLLM takes without a flag, and the place in vLLM's code that sets it."""

    value: int | bool | str
    source: str


DEVICES = {
    "h100": Platform("cuda", "NVIDIA H100 80GB HBM3", 81_559 * MIB, (9, 0), 132, key="h100"),
    "h200": Platform("cuda", "NVIDIA H200", 143_771 * MIB, (9, 0), 132, key="h200"),
    "b200": Platform("cuda", "NVIDIA B200", 183_359 * MIB, (10, 0), 148, key="b200"),
    "a100": Platform("cuda", "NVIDIA A100-SXM4-80GB", 81_920 * MIB, (8, 0), 108, key="a100"),
    "l40s": Platform("cuda", "NVIDIA L40S", 46_068 * MIB, (8, 9), 142, key="l40s"),
    "l4": Platform("cuda", "NVIDIA L4", 23_034 * MIB, (8, 9), 58, key="l4"),
    "3090": Platform("cuda", "NVIDIA GeForce RTX 3090", 24_576 * MIB, (8, 6), 82, key="3090"),
    "4090": Platform("cuda", "NVIDIA GeForce RTX 4090", 24_564 * MIB, (8, 9), 128, key="4090"),
    "5090": Platform("cuda", "NVIDIA GeForce RTX 5090", 32_607 * MIB, (12, 0), 170, key="5090"),
    "rtx-pro-6000": Platform(
        "cuda", "NVIDIA RTX PRO 6000 Blackwell", 97_887 * MIB, (12, 0), 188, key="rtx-pro-6000"
    ),
    # nvidia-smi shows no memory of a GB10: vLLM's own line does, "Free memory on device cuda:0 (109.66/119.63 GiB)".
    "gb10": Platform("cuda", "NVIDIA GB10", int(119.63 * GIB), (12, 1), 48, key="gb10"),
    # torch's "total capacity of 191.98 GiB". vLLM's ROCm platform is not asked: CUDA's stands for it.
    "mi300x": Platform(
        "cuda", "AMD Instinct MI300X, asked as CUDA", int(191.98 * GIB), (9, 4), 304, key="mi300x"
    ),
    "cpu": Platform("cpu", "CPU", key="cpu"),
}
"""Platforms by key. Memory is what nvidia-smi shows, capability is from NVIDIA's table of GPUs. For `cpu`,
KVTUNE_AVX512_BF16 or else this CPU decides on BF16."""

MEMORY = re.compile(r"(\d{1,4}(?:\.\d{1,3})?)GiB")
"""The pattern by which --like-device names a GPU by its memory."""

LARGE_GPU = DEVICES["h100"]
"""The GPU that `--on host` stands for on a machine that has none."""


def device(key: str) -> Platform:
    """Return the platform that --like-device names: a key of DEVICES, or a GPU by its memory, e.g. `80GiB`."""
    if memory := MEMORY.fullmatch(key):
        like = DEVICES["h100"]
        name, size = f"a GPU with {memory[1]} GiB", int(float(memory[1]) * GIB)
        return Platform("cuda", name, size, like.capability, like.multiprocessors, key=key)
    if key not in DEVICES:
        mean = did_you_mean(key, tuple(DEVICES))
        raise UsageError(
            f"--like-device {repr(key)[1:-1]}: there is no such device",
            f"{mean}devices: {', '.join(DEVICES)}; or a GPU by its memory, for instance 80GiB",
        )
    chosen = DEVICES[key]
    return cpu(key) if chosen.kind == "cpu" else chosen


def cpu(key: str = "") -> Platform:
    """Return this machine's CPU as a platform."""
    return Platform("cpu", "this machine's CPU", float32_states=avx512_bf16(), key=key)


def defaults(platform: Platform, ranks: int = 1) -> dict[str, Default]:
    """Return the defaults by vLLM's name of the setting. `ranks`: tensor times pipeline parallel size."""
    tokens, sequences = _batch(platform, ranks)
    batch = "EngineArgs.get_batch_defaults for a server"
    both = {
        "max_num_batched_tokens": Default(tokens, batch),
        "max_num_seqs": Default(sequences, batch),
    }
    if platform.kind == "cpu":
        source = "CpuPlatform.check_and_update_config"
        return {
            **both,
            "block_size": Default(128, source),
            "block_multiple": Default(32, "CPUAttentionBackend.get_supported_kernel_block_sizes"),
            "async_scheduling": Default(False, source),
            "model_runner": Default("V1", "CPUWorker"),
            "executor": Default("mp", source),
            "largest_graph": Default(0, source),
        }
    most = 1024 if platform.capability[0] == 10 else 512
    return {
        **both,
        "block_size": Default(16, "CacheConfig.DEFAULT_BLOCK_SIZE"),
        "block_multiple": Default(16, "FlashAttentionBackend.get_supported_kernel_block_sizes"),
        "async_scheduling": Default(True, "VllmConfig.__post_init__"),
        "model_runner": Default("V2", "VllmConfig.use_v2_model_runner"),
        "executor": Default("uni" if ranks == 1 else "mp", "ParallelConfig.__post_init__"),
        "largest_graph": Default(min(2 * sequences, most), "VllmConfig._set_cudagraph_sizes"),
    }


BY_MEMORY = "as if a step's activations and CUDA graphs took no memory"
"""What is assumed of a pool that a device's memory sizes: only an engine measures those two, and then has less."""


def _batch(platform: Platform, ranks: int) -> tuple[int, int]:
    """Return the most tokens and requests of a step. vLLM gives an A100 less, and from 0.33 on a GB10."""
    if platform.kind == "cpu":
        return 2048 * ranks, 128 * ranks
    if platform.memory_bytes >= 160 * GIB:
        return 16384, 1024
    version = release(installed_version())
    slow_since_033 = platform.capability == (12, 1) and (not version or version >= (0, 33))
    small = "a100" in platform.name.lower() or slow_since_033
    if platform.memory_bytes >= 70 * GIB and not small:
        return 8192, 1024
    return 2048, 256


def origins(given: frozenset[str], recipe: frozenset[str], platform: str) -> dict[str, str]:
    """Return where each setting of `DECIDED` comes from: `flag`, `recipe`, or vLLM's default for `platform`.

    `given`: settings that flags or a recipe give. `recipe`: settings that only the recipe gives.
    """
    flags = {name: "flag" for name in DECIDED if name.replace("_", "-") in given}
    recipes = {name: "recipe" for name in DECIDED if name in recipe}
    return dict.fromkeys(DECIDED, f"vLLM's default for {platform}") | flags | recipes


DECIDED = ("max_num_batched_tokens", "max_num_seqs", "block_size")
"""Settings that decide what the cache holds and hits, and whose defaults differ between devices."""
