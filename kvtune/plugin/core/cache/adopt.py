"""Puts the core's pool and window retention into the KV cache managers that vLLM builds. Runs in EngineCore.

Contract: an object that vLLM built gets the core's class if it is of exactly the type that the core was written for.
Others (HiSparse's pools, other backends' managers) stay as they are, and the core's state says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvtune.data.knobs import AUTO, CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.core.breaker import breaker_of
from kvtune.plugin.vllm.plugin_state import STATE

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from kvtune.plugin.vllm.types import GroupManager

PART = "cache.adopt"


def install(settings: CoreSettings) -> None:
    """Give every KV cache manager built from now on the core's pool. A second call replaces the settings."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    def built(manager: KVCacheManager) -> None:
        if type(manager) is KVCacheManager:
            breaker_of(manager).attempt(adopt, manager, settings)

    STATE.patches.undo(PART)
    STATE.patches.after(PART, KVCacheManager, "__init__", built)


def adopt(manager: KVCacheManager, settings: CoreSettings) -> None:
    """Give one manager's pool and window groups the core's classes, or record why not."""
    from vllm.v1.core.block_pool import BlockPool

    from kvtune.plugin.core.cache import states as state_groups
    from kvtune.plugin.core.cache import windows as window
    from kvtune.plugin.core.cache.manager import KeepingManager
    from kvtune.plugin.core.cache.pool import PolicyPool

    pool = manager.block_pool
    groups = manager.coordinator.single_type_managers
    why = ""
    if not settings.pool:
        why = "switched off"
    elif not manager.enable_caching:
        why = "prefix caching is off"
    elif type(pool) is not BlockPool or any(group.block_pool is not pool for group in groups):
        why = "this engine has block pools of another kind"
    if why:
        for name in ("pool", "pinning"):
            state.part(name, False, why)
        state_groups.left(settings, why)
        return

    reasons = {group.kv_cache_group_id: window.supports(group) for group in groups}
    windows = [group for group in groups if not reasons[group.kv_cache_group_id]]
    states = state_groups.kept(manager, settings)
    policy = effective_policy(settings, bool(windows or states))
    pinned = windows if settings.pinning else []
    state.part("pool", True)
    state.part("pinning", bool(pinned), _missed_windows(settings, windows or states))
    for why in _left_to_stock(groups, reasons):
        state.note(why)
    if not (states or pinned) and policy == "lru":
        return  # stock's queue is LRU already

    breaker = breaker_of(manager)
    PolicyPool.adopt_queues(pool, policy, settings, breaker)
    queues = pool.free_block_queue
    pool.__class__ = PolicyPool
    breaker.on_trip(pool.stand_down)
    for group in pinned:
        group.__class__ = window.KeepingWindowManager
        breaker.on_trip(group.stand_down)
        group.adopt_window(settings, breaker)
    if states:
        state_groups.adopt_groups(states, settings, breaker)
    if (pinned or states) and policy != "pin":
        manager.__class__ = KeepingManager
        manager.windows = tuple(pinned)
        manager.states = tuple(states)
        manager.keeps_output = settings.output_window
        breaker.on_trip(manager.stand_down)
    state.gauge(lambda: {**queues.counters(), "pool_failures": int(breaker.tripped)})


def _left_to_stock(groups: Sequence[GroupManager], reasons: Mapping[int, str]) -> list[str]:
    """Return a note for each kind of window that vLLM's own code goes on to handle, with the reason."""
    left: dict[str, None] = {}
    for group in groups:
        window, why = getattr(group, "sliding_window", None), reasons[group.kv_cache_group_id]
        if window and why:
            left[f"pinning: windows of {window} tokens stay as vLLM keeps them: {why}"] = None
    return list(left)


def _missed_windows(settings: CoreSettings, windows: Sequence[GroupManager]) -> str:
    """Return a note if settings of pinning do nothing because the model has no sliding windows."""
    inert = settings.changed().keys() & {"pin_window", "slack", "min_drop", "windows", "output_window"}
    return (
        f"no sliding-window groups: {', '.join(sorted(inert))} does nothing" if inert and not windows else ""
    )


def effective_policy(settings: CoreSettings, has_windows: bool) -> str:
    """Return the policy that runs: without sliding windows `lru`, unless it is `two_class` with a bonus."""
    policy = settings.policy
    if policy == AUTO:
        policy = "two_class" if settings.reuse_bonus_s else "first"
    if not has_windows and not (policy == "two_class" and settings.reuse_bonus_s):
        return "lru"
    return policy
