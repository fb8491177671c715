"""Admission by cached prefix: which schedulers get the queue of `waiting.py`, and why others do not. EngineCore.

Contract: off by default. Only the waiting queue of a scheduler is exchanged, so this works with both of vLLM's
schedulers, with the core's, and in the simulator.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from vllm.v1.core.sched.request_queue import FCFSRequestQueue, SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from kvtune.core import state
from kvtune.core.admission.prefixes import Prefixes
from kvtune.core.admission.waiting import LongestPrefixQueue
from kvtune.core.patches import PATCHES
from kvtune.core.settings import CoreSettings

logger = logging.getLogger("vllm.kvtune")


def why_not(scheduler: Scheduler) -> str:
    """Why this engine admits requests in stock's order; empty when it need not."""
    if scheduler.policy is not SchedulingPolicy.FCFS:
        return "priority scheduling has an order of its own"
    if type(scheduler.waiting) is not FCFSRequestQueue:
        return f"the waiting queue is a {type(scheduler.waiting).__name__}"
    if not scheduler.kv_cache_manager.enable_caching:
        return "prefix caching is off"
    if group_of(scheduler) is None:
        return "no full-attention group in whose blocks prompts are hashed"
    return ""


def group_of(scheduler: Scheduler) -> int | None:
    """The full-attention group whose blocks are hashed whole; None when there is none."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    for group in groups:
        if type(group) is FullAttentionManager and group.block_size == scheduler.hash_block_size:
            return int(group.kv_cache_group_id)
    return None


def adopt(scheduler: Scheduler, settings: CoreSettings) -> None:
    """Exchange the waiting queue of a scheduler that vLLM has built, or record why not."""
    why = why_not(scheduler)
    state.part("admission", not why, why)
    group = group_of(scheduler)
    if why or group is None:
        return
    prefixes = Prefixes(scheduler.kv_cache_manager, group, scheduler.hash_block_size)
    queue = LongestPrefixQueue(scheduler, prefixes, settings.admission_age_s)
    for request in scheduler.waiting:
        queue.add_request(request)
    scheduler.waiting = queue
    state.gauge(queue.counters)


PART = "admission.install"


def install(settings: CoreSettings) -> None:
    """Every scheduler that is built from now on admits requests as the settings say."""
    uninstall()
    if settings.admission == "fcfs":
        return

    def wrap(build: Callable[..., None]) -> Callable[..., None]:
        def built(self: Scheduler, *args: object, **options: object) -> None:
            build(self, *args, **options)
            try:
                adopt(self, settings)
            except Exception as error:
                state.part("admission", False, f"could not be put in: {error!r}")
                logger.error("kvtune: requests are admitted as they come", exc_info=error)

        return built

    PATCHES.wrap(PART, Scheduler, "__init__", wrap)


def uninstall() -> None:
    """Schedulers that are built from now on have stock's queue."""
    PATCHES.undo(PART)
