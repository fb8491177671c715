"""Until when does a decoding request need nothing from the KV cache manager? Runs in EngineCore.

`noop_limits` answers it in closed form from the managers' own state; between a request's events `allocate_slots` of
stock is a no-op that returns the empty block list, so `NoopSlots` returns that one immutable object at once.
The limits only ever err on the early side: then stock's code runs, does nothing and the limits are taken anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

NEVER = 1 << 60


class NoopLimits(NamedTuple):
    """Nothing happens while all of it holds for a request's next step of one token.

    | limit | holds while | else |
    |---|---|---|
    | slots | computed tokens < slots | a group needs a block |
    | cached | tokens to hash < cached | a full block gets its hash |
    | window | computed - in flight < window | blocks leave a sliding window, or hold a state that was followed up |
    | echo | tokens to hash >= echo | stock says again that the prompt's last state is from this very step |

    The last one matters only in a step that may admit somebody: who would hit that state waits for the next step.
    """

    slots: int
    cached: int
    window: int
    echo: int


def noop_limits(manager: KVCacheManager, request: Request) -> NoopLimits:
    """The limits of a running request, from the state of its groups' managers."""
    request_id = request.request_id
    processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
    slots = cached = window = NEVER
    echo = 0
    for group in manager.coordinator.single_type_managers:
        blocks = group.req_to_blocks.get(request_id, ())
        size = group.block_size
        slots = min(slots, len(blocks) * size)
        if group.enable_caching and group.kv_cache_spec.prefix_cacheable:
            cached = min(cached, (group.num_cached_block.get(request_id, 0) + 1) * size)
        span = getattr(group, "sliding_window", 0)
        if span:
            span += group.extra_retained_tokens - 1
            gone = max(0, processed - span) // size
            dropped = gone == 0 or blocks[min(gone, len(blocks)) - 1].is_null
            window = min(window, (gone + 1) * size + span if dropped else 0)
        elif getattr(group, "mamba_cache_mode", "") == "align":
            if request_id in group._partial_hit_reqs or request_id in group._checkpoints:
                slots = 0
            window = min(window, _state_kept_until(group, request_id, blocks))
            whole = (request.num_prompt_tokens - 1) // size
            if group.enable_caching and 0 < whole <= len(blocks) and not blocks[whole - 1].is_null:
                echo = max(echo, (whole + 1) * size)
    return NoopLimits(slots, cached, window, echo)


def _state_kept_until(group: Any, request_id: str, blocks: Sequence[Any]) -> int:
    """Processed tokens at which a state is given back: of the blocks behind, or the one that a new block took over."""
    kept = group._num_retired_blocks.get(request_id, 0)
    last = group.last_state_block_idx.get(request_id)
    if last is not None and last < len(blocks) and not blocks[last].is_null:
        kept = min(kept, last)
    until: int = (kept + 1) * group.block_size + 1
    return until


def why_unsupported(manager: KVCacheManager) -> str:
    """Why the closed form does not hold for this engine's managers; empty when it does."""
    from vllm.v1.core.single_type_kv_cache_manager import (
        FullAttentionManager,
        MambaManager,
        SlidingWindowManager,
    )

    for group in manager.coordinator.single_type_managers:
        # A subclass that acts at other moments than its base says so; ours do not.
        base = type(group)
        while base.__module__.startswith("kvtune.") and base.__base__ is not None:
            base = base.__base__
        if base not in (FullAttentionManager, SlidingWindowManager, MambaManager):
            return f"{base.__name__} has its own rules"
        if base is MambaManager and (
            group.mamba_cache_mode == "all"
            or group.num_speculative_blocks
            or group.has_prefill_checkpoint_blocks
        ):
            return "states are kept inside a chunk, or for every block"
        if group.enable_caching and group.block_size != manager.block_pool.hash_block_size:
            return "blocks are hashed in finer units than they are allocated"
        if group._record_new_block_ids and group.dcp_world_size > 1:
            return "context parallel decoding"
    if manager.coordinator.eagle_group_ids or manager.coordinator.num_reprefillable_tokens:
        return "speculative decoding"
    return ""


class NoopSlots:
    """Mixin in front of a KVCacheManager class: `allocate_slots` costs next to nothing between a request's events."""

    noop_limits: dict[str, NoopLimits]

    def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **options: Any) -> Any:
        manager: Any = self
        if num_new_tokens != 1 or args or options != ONE_DECODE:
            return super().allocate_slots(request, num_new_tokens, *args, **options)  # type: ignore[misc]
        limits = self.limits_of(request)
        computed = request.num_computed_tokens
        if (
            computed < limits.slots
            and computed - request.num_in_flight_tokens < limits.window
            and limits.echo <= min(computed + 1, request.num_tokens) < limits.cached
        ):
            return manager.empty_kv_cache_blocks
        return self.allocate_at_event(request)

    def allocate_at_event(self, request: Any) -> Any:
        """`allocate_slots` of one token where something is to be done; the limits are taken anew when next asked."""
        manager: Any = self
        limits = self.limits_of(request)
        del self.noop_limits[request.request_id]
        computed = request.num_computed_tokens
        if computed < limits.slots and computed - request.num_in_flight_tokens < limits.window:
            # A full block is to be hashed, and nothing else.
            manager.cache_blocks(request, min(computed + 1, request.num_tokens))
            return manager.empty_kv_cache_blocks
        return super().allocate_slots(request, 1, **ONE_DECODE)  # type: ignore[misc]

    def limits_of(self, request: Any) -> NoopLimits:
        """The limits of a request, remembered until its next event."""
        limits = self.noop_limits.get(request.request_id)
        if limits is None:
            limits = self.noop_limits[request.request_id] = noop_limits(self, request)
        return limits

    def free(self, request: Any) -> None:
        self.noop_limits.pop(request.request_id, None)
        super().free(request)  # type: ignore[misc]

    def pop_blocks_for_free(self, request: Any) -> Any:
        self.noop_limits.pop(request.request_id, None)
        return super().pop_blocks_for_free(request)  # type: ignore[misc]


ONE_DECODE = {"num_lookahead_tokens": 0}


@cache
def with_noop_slots(manager_class: type[Any]) -> type[Any]:
    """The subclass of a KVCacheManager class that has NoopSlots in front."""
    return type(f"NoopLimits{manager_class.__name__}", (NoopSlots, manager_class), {"__module__": __name__})


def adopt(manager: KVCacheManager) -> None:
    """Put NoopSlots in front of a manager that vLLM (and maybe the core's pool) has built."""
    manager.noop_limits = {}
    manager.__class__ = with_noop_slots(type(manager))  # type: ignore[arg-type]
