"""What versions of vLLM name or place otherwise. Decided by what is there, never by comparing versions."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, TypedDict

from kvtune.core.compat.symbols import MOVED
from kvtune.core.vllm_types import Scheduler


class Hashing(TypedDict):
    """How a scheduler hashes and keeps blocks, in tokens."""

    hash_block_size: int
    hit_alignment_tokens: int | None
    retention_interval: int | None


def hashing(scheduler: Scheduler) -> Hashing:
    """vLLM before 0.32 does not put all of it into its KVCacheConfig."""
    config, coordinator = scheduler.kv_cache_config, scheduler.kv_cache_manager.coordinator
    hashed = getattr(config, "hash_block_size", None)
    aligned = getattr(config, "cache_hit_alignment_tokens", None)
    return {
        "hash_block_size": scheduler.kv_cache_manager.block_pool.hash_block_size
        if hashed is None
        else hashed,
        "hit_alignment_tokens": (
            getattr(coordinator, "_cache_hit_alignment_tokens", None) if aligned is None else aligned
        ),
        "retention_interval": config.prefix_cache_retention_interval,
    }


def home_of(symbol: str) -> Any:
    """The module that defines a function which some versions define elsewhere (`MOVED`)."""
    module, _, name = symbol.rpartition(".")
    for home in (module, *MOVED.get(symbol, ())):
        try:
            found = importlib.import_module(home)
        except ModuleNotFoundError:
            continue
        if getattr(getattr(found, name, None), "__module__", "") == home:
            return found
    raise ImportError(f"vLLM has no {symbol}")


def cli_env_setup() -> Callable[[], None]:
    """The function that prepares the environment for `vllm serve`."""
    for home in ("vllm.entrypoints.common.startup", "vllm.entrypoints.serve.utils.api_utils"):
        try:
            setup: Callable[[], None] = importlib.import_module(home).cli_env_setup
        except (ModuleNotFoundError, AttributeError):
            continue
        return setup
    raise ImportError("vLLM has no cli_env_setup")
