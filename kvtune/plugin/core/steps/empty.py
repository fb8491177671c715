"""Skips `allocate_slots` calls that would do nothing for a decoding request. Runs in EngineCore.

While a request decodes within a block, stock's `allocate_slots` returns an empty block list. `noop_limits` computes in
closed form how long it will, and `NoopSlots` returns one shared empty list until then. A limit is never too late. It
may be too early: stock's code then runs once without effect, and the limits are computed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from kvtune.plugin.core.breaker import breaker_of
from kvtune.plugin.vllm.types import (
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheManager,
    Request,
    StateManager,
    has_states,
    has_window,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager as Base
else:
    Base = object

NEVER = 1 << 60


class NoopLimits(NamedTuple):
    """Allocating the next token of a request does nothing while all four conditions hold.

    | limit | condition | otherwise |
    |---|---|---|
    | slots | computed tokens < slots | a group needs a new block |
    | cached | tokens to hash < cached | a full block gets its hash |
    | window | computed - in flight < window | blocks leave a sliding window, or a newer state replaces an older one |
    | echo | tokens to hash >= echo | stock still reports the prompt's last state as made in this step |

    `echo` matters only in a step that may admit a request: a request that would hit that state must wait a step.
    """

    slots: int
    cached: int
    window: int
    echo: int


def noop_limits(manager: KVCacheManager, request: Request) -> NoopLimits:
    """Compute the limits of a running request from the state of its KV cache groups."""
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
        if has_window(group):
            span = group.sliding_window + group.extra_retained_tokens - 1
            gone = max(0, processed - span) // size
            dropped = gone == 0 or blocks[min(gone, len(blocks)) - 1].is_null
            window = min(window, (gone + 1) * size + span if dropped else 0)
        elif has_states(group) and group.mamba_cache_mode == "align":
            if request_id in group._partial_hit_reqs or request_id in group._checkpoints:
                slots = 0
            window = min(window, _state_kept_until(group, request_id, blocks))
            whole = (request.num_prompt_tokens - 1) // size
            if group.enable_caching and 0 < whole <= len(blocks) and not blocks[whole - 1].is_null:
                echo = max(echo, (whole + 1) * size)
    return NoopLimits(slots, cached, window, echo)


def _state_kept_until(group: StateManager, request_id: str, blocks: Sequence[KVCacheBlock]) -> int:
    """Return the number of processed tokens at which the group next frees a state (old, or moved to a new block)."""
    kept = group._num_retired_blocks.get(request_id, 0)
    last = group.last_state_block_idx.get(request_id)
    if last is not None and last < len(blocks) and not blocks[last].is_null:
        kept = min(kept, last)
    return (kept + 1) * group.block_size + 1


def why_unsupported(manager: KVCacheManager) -> str:
    """Return why `noop_limits` does not hold for this engine's managers; empty if it does."""
    from vllm.v1.core.single_type_kv_cache_manager import (
        FullAttentionManager,
        MambaManager,
        SlidingWindowManager,
    )

    for group in manager.coordinator.single_type_managers:
        # The core's own subclasses allocate at the same moments as their vLLM bases.
        base = next(kind for kind in type(group).__mro__ if not kind.__module__.startswith("kvtune."))
        if base not in (FullAttentionManager, SlidingWindowManager, MambaManager):
            return f"{base.__name__} has its own rules"
        if (
            base is MambaManager
            and has_states(group)
            and (
                group.mamba_cache_mode == "all"
                or group.num_speculative_blocks
                or group.has_prefill_checkpoint_blocks
            )
        ):
            return "states are kept inside a chunk, or for every block"
        if group.enable_caching and group.block_size != manager.block_pool.hash_block_size:
            return "blocks are hashed in finer units than they are allocated"
        if group._record_new_block_ids and group.dcp_world_size > 1:
            return "context parallel decoding"
    if manager.coordinator.eagle_group_ids or manager.coordinator.num_reprefillable_tokens:
        return "speculative decoding"
    return ""


class NoopSlots(Base):  # type: ignore[misc]
    """Mixin for a KVCacheManager class: `allocate_slots` returns at once if it would do nothing."""

    noop_limits: dict[str, NoopLimits]
    """Keyed by request id; computed when first needed, dropped when the request is freed or allocates."""
    empty_kv_cache_blocks: KVCacheBlocks
    stock_class: type[Base]
    """vLLM's own class, which the manager gets back after an error."""

    def allocate_slots(
        self, request: Request, num_new_tokens: int, *args: object, **options: object
    ) -> KVCacheBlocks | None:
        hashes = 0
        if num_new_tokens == 1 and not args and options == ONE_DECODE:
            try:
                limits = self.limits_of(request)
                computed = request.num_computed_tokens
                if computed < limits.slots and computed - request.num_in_flight_tokens < limits.window:
                    upto = min(computed + 1, request.num_tokens)
                    if limits.echo <= upto < limits.cached:
                        return self.empty_kv_cache_blocks
                    hashes = upto  # no more is due than a full block's hash
                del self.noop_limits[request.request_id]
            except Exception as error:
                hashes = 0
                breaker_of(self).trip(error)
        if hashes:
            self.cache_blocks(request, hashes)
            return self.empty_kv_cache_blocks
        blocks: KVCacheBlocks | None = self.stock_class.allocate_slots(
            self, request, num_new_tokens, *args, **options
        )
        return blocks

    def allocate_at_event(self, request: Request) -> KVCacheBlocks | None:
        """Allocate one token of a request that has reached a limit, and drop its limits, to be computed again."""
        limits = self.limits_of(request)
        del self.noop_limits[request.request_id]
        computed = request.num_computed_tokens
        if computed < limits.slots and computed - request.num_in_flight_tokens < limits.window:
            # Only `cached` was reached: a full block gets its hash.
            self.cache_blocks(request, min(computed + 1, request.num_tokens))
            return self.empty_kv_cache_blocks
        blocks: KVCacheBlocks | None = self.stock_class.allocate_slots(self, request, 1, **ONE_DECODE)
        return blocks

    def limits_of(self, request: Request) -> NoopLimits:
        """Return a request's limits. They are kept until the request reaches one."""
        limits = self.noop_limits.get(request.request_id)
        if limits is None:
            limits = self.noop_limits[request.request_id] = noop_limits(self, request)
        return limits

    def free(self, request: Request) -> None:
        self.noop_limits.pop(request.request_id, None)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        self.noop_limits.pop(request.request_id, None)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request)
        return blocks


ONE_DECODE = {"num_lookahead_tokens": 0}


@cache
def with_noop_slots(manager_class: type[Base]) -> type[NoopSlots]:
    """Return the subclass of a KVCacheManager class that has NoopSlots as first base."""
    return type(f"NoopLimits{manager_class.__name__}", (NoopSlots, manager_class), {"__module__": __name__})


def adopt(manager: Base) -> None:
    """Add NoopSlots to the class of a KVCacheManager (stock's or the core's)."""
    kind = type(manager)
    stock = next(base for base in kind.__mro__ if base.__module__.startswith("vllm."))

    def stand_down() -> None:
        manager.__class__ = stock

    breaker_of(manager).on_trip(stand_down)
    manager.noop_limits = {}
    manager.stock_class = stock
    manager.__class__ = with_noop_slots(kind)  # type: ignore[arg-type]
