"""Finds what versions of vLLM name differently or define elsewhere. Never compares versions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from typing import Any, TypedDict

from kvtune.data.installed import installed_version, source_path
from kvtune.data.knobs import ENGINE
from kvtune.plugin.vllm.symbols import MOVED
from kvtune.plugin.vllm.types import Coordinator, Scheduler, VllmConfig

CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"


class Hashing(TypedDict):
    """How a scheduler hashes and keeps blocks, in tokens."""

    hash_block_size: int
    hit_alignment_tokens: int | None
    retention_interval: int | None


def hashing(scheduler: Scheduler) -> Hashing:
    """Return how the scheduler hashes blocks. vLLM before 0.32 does not have all of it in its KVCacheConfig."""
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


def dropping_groups(coordinator: Coordinator) -> Collection[int]:
    """Return the groups whose last matching block EAGLE drops; vLLM 0.33 need not drop it, see `hash_lookahead`."""
    dropping: Collection[int] = getattr(coordinator, "drop_eagle_group_ids", coordinator.eagle_group_ids)
    return dropping


def hash_lookahead(scheduler: object) -> int:
    """Return how many tokens after a block its hash covers, so that a drafter can use the last block; 0 before 0.33."""
    return int(getattr(scheduler, "num_hash_lookahead_tokens", 0))


def speculation_reads(setting: str) -> bool:
    """Whether the installed vLLM's speculative configuration has this setting. Reads its file, imports nothing."""
    path = source_path("vllm.config.speculative")
    return path is not None and f"    {setting}:".encode() in path.read_bytes()


def state_step(vllm_config: VllmConfig) -> int:
    """Return the tokens whose multiples a model's blocks are, so that its kernels keep states there; 1 before 0.33."""
    from vllm.model_executor.layers.mamba import abstract

    asked = getattr(abstract, "get_mamba_prefill_checkpoint_alignment", None)
    if asked is None or vllm_config.cache_config.mamba_cache_mode != "align":
        return 1
    return int(asked(vllm_config) or 1)


def preemptions(finished: object) -> int:
    """Return how often a finished request was preempted, from its statistics; 0 for vLLM before 0.30."""
    return int(getattr(finished, "num_preemptions", 0))


def prefill_interval(scheduler: object) -> int:
    """Return the fewest steps from one prefill to the next (`--prefill-schedule-interval`); 1 before vLLM 0.33."""
    return int(getattr(scheduler, "local_prefill_interval", 1))


def without_effect(setting: str) -> str:
    """Return why the installed vLLM ignores a setting that other versions use; empty if it uses the setting.

    Reads vLLM's files, imports nothing of it. Empty, too, if vLLM is not installed.
    """
    if setting == "prefill_schedule_interval":
        path = source_path("vllm.v1.core.sched.scheduler")
        if path is not None and b"local_prefill_interval" not in path.read_bytes():
            return f"the scheduler of vLLM {installed_version()} does nothing with it on a single engine"
    if setting in ("eviction_policy", "blocks_per_chunk", "store_threshold"):
        texts = _offloading_sources()
        if texts and not any(f'"{setting}"'.encode() in text for text in texts):
            return f"the offloading connector of vLLM {installed_version()} does not read it"
    knob = ENGINE.get(setting)
    if knob is not None and knob.config:
        path = source_path(f"vllm.config.{knob.config}")
        if path is not None and f"    {setting}:".encode() not in path.read_bytes():
            return f"vLLM {installed_version()} has no such setting"
    return ""


def _offloading_sources() -> list[bytes]:
    """Return the source texts of vLLM's own offloading to host memory."""
    tier, connectors = source_path("vllm.v1.kv_offload"), source_path(f"{CONNECTORS}.offloading_connector")
    if tier is None or connectors is None:
        return []
    files = [*tier.parent.rglob("*.py"), connectors, *(connectors.parent / "offloading").rglob("*.py")]
    return [file.read_bytes() for file in files]


def holds_prefills(scheduler: Any) -> bool:
    """Whether stock vLLM, while requests decode, admits no prefill in the next step, as the last one is too recent."""
    interval = prefill_interval(scheduler)
    return interval > 1 and bool(
        not scheduler.prefill_capacity_bound
        and scheduler.num_executed_steps + 1 - scheduler.last_prefill_step < interval
    )


def count_step(scheduler: Any) -> None:
    """Count an executed step, in the versions of vLLM that count them for `prefill_schedule_interval`."""
    if hasattr(scheduler, "num_executed_steps"):
        scheduler.num_executed_steps += 1


def home_of(symbol: str) -> Any:
    """Import the module that defines a function of `MOVED` in the installed version."""
    module, _, name = symbol.rpartition(".")
    for home in (module, *MOVED.get(symbol, ())):
        try:
            loaded = importlib.import_module(home)
        except ModuleNotFoundError:
            continue
        if getattr(getattr(loaded, name, None), "__module__", "") == home:
            return loaded
    raise ImportError(f"vLLM has no {symbol}")


def cli_env_setup() -> Callable[[], None]:
    """Return the function that prepares the environment for `vllm serve`."""
    return _first(
        "cli_env_setup", "vllm.entrypoints.common.startup", "vllm.entrypoints.serve.utils.api_utils"
    )


def serve_parser() -> Any:
    """Return the parser of the flags of `vllm serve`."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    homes = ("common", "launchers", "openai")
    make = _first("make_arg_parser", *(f"vllm.entrypoints.{home}.cli_args" for home in homes))
    return make(FlexibleArgumentParser())


def _first(name: str, *homes: str) -> Callable[..., Any]:
    """Return a function from the first of these modules that has it."""
    for home in homes:
        try:
            function: Callable[..., Any] = getattr(importlib.import_module(home), name)
        except (ModuleNotFoundError, AttributeError):
            continue
        return function
    raise ImportError(f"vLLM has no {name}")
