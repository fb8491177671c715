"""Which schedulers get the steady-decode path (`schedule.py`, `update.py`), and how. Runs in EngineCore.

Contract: a scheduler of exactly vLLM's class becomes a subclass of it once vLLM has built it. Others stay as they are,
and the core's state says so.
"""

from __future__ import annotations

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.core.breaker import breaker_of
from kvtune.plugin.core.steps import empty
from kvtune.plugin.core.steps.schedule import SteadyDecode
from kvtune.plugin.core.steps.tier import tier_of
from kvtune.plugin.vllm.plugin_state import STATE

PART = "steps.scheduler"


def why_never_steady(scheduler: Scheduler) -> str:
    """Return why this engine can never take the steady-decode path; empty if it can."""
    config = scheduler.vllm_config
    reasons = {
        "speculative decoding": config.speculative_config is not None
        or scheduler.num_spec_tokens
        or scheduler.num_lookahead_tokens,
        "LoRA": scheduler.lora_config is not None,
        "a KV connector": (scheduler.connector is not None and tier_of(scheduler.connector) is None)
        or getattr(scheduler, "defer_async_loads", False),
        "an encoder cache connector": scheduler.ec_connector is not None,
        "auxiliary outputs": scheduler.aux_output_connector is not None,
        "sampling masks": scheduler.return_sampling_mask,
        "pipeline parallelism": scheduler.use_pp,
        "an encoder": scheduler.is_encoder_decoder or scheduler.is_mm_encoder_only,
        "a pooling or diffusion model": scheduler.num_sampled_tokens_per_step != 1,
        "KV cache events": scheduler.enable_kv_cache_events,
        "MFU metrics": scheduler.perf_metrics is not None,
    }
    for reason, holds in reasons.items():
        if holds:
            return reason
    return empty.why_unsupported(scheduler.kv_cache_manager)


class SteadyScheduler(SteadyDecode, Scheduler):  # type: ignore[misc]
    """vLLM's Scheduler with the steady-decode path."""


class SteadyAsyncScheduler(SteadyDecode, AsyncScheduler):  # type: ignore[misc]
    """vLLM's AsyncScheduler with the steady-decode path."""


SUCCESSORS: dict[type, type] = {Scheduler: SteadyScheduler, AsyncScheduler: SteadyAsyncScheduler}


def adopt(scheduler: Scheduler, settings: CoreSettings) -> None:
    """Turn on `empty_blocks` and `steady` in a scheduler that vLLM has built. Only vLLM's own classes get `steady`."""
    successor = SUCCESSORS.get(type(scheduler))
    manager = scheduler.kv_cache_manager
    if breaker_of(manager).tripped:
        return
    if settings.empty_blocks:
        why = empty.why_unsupported(manager)
        if not why:
            empty.adopt(manager)
        state.part("empty_blocks", not why, why)
    if settings.steady:
        if successor is None:
            state.part("steady", False, f"{type(scheduler).__name__} is not vLLM's own scheduler")
            return
        why = why_never_steady(scheduler)
        scheduler.__class__ = successor
        scheduler.adopt_steady(why)


def install(settings: CoreSettings) -> None:
    """Turn on what the settings say in every scheduler built from now on."""
    STATE.patches.undo(PART)
    if not (settings.steady or settings.empty_blocks):
        return

    def built(scheduler: Scheduler) -> None:
        breaker_of(scheduler.kv_cache_manager).attempt(adopt, scheduler, settings)

    STATE.patches.after(PART, Scheduler, "__init__", built)
