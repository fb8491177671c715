"""Overrides vLLM's check for AVX-512 BF16 while it configures itself (KVTUNE_AVX512_BF16).

Without that variable nothing is changed. With it only the configuration may change: data types of states, and with them
block sizes. Kernels still ask the real CPU. Loaded with the core's plugin, in every process that makes a configuration.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from kvtune.base.cpu import VARIABLE, forced
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.types import VllmConfig

PART = "cpu_flags"


def install() -> None:
    """Wrap CpuPlatform.check_and_update_config once; do nothing without the variable."""
    if PART in STATE.loaded or not os.environ.get(VARIABLE):
        return
    import torch
    from vllm.platforms.cpu import CpuPlatform

    def wrap(check: Callable[..., None]) -> Callable[..., None]:
        def check_and_update_config(cls: type, vllm_config: VllmConfig) -> None:
            answer = forced()
            if answer is None:
                return check(cls, vllm_config)
            real = torch.cpu._is_avx512_bf16_supported
            torch.cpu._is_avx512_bf16_supported = lambda: answer
            try:
                return check(cls, vllm_config)
            finally:
                torch.cpu._is_avx512_bf16_supported = real

        return check_and_update_config

    STATE.patches.wrap(PART, CpuPlatform, "check_and_update_config", wrap)
    STATE.loaded.add(PART)
