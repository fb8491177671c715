"""vLLM's BlockPool with several free queues; a policy chooses the queue to evict from. Runs in EngineCore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvtune.core.breaker import Breaker
from kvtune.core.cache.queues import BLANK, Queues
from kvtune.core.cache.quick import QuickPool
from kvtune.core.policies import OUTPUT, WINDOW
from kvtune.knobs import CoreSettings


class PolicyPool(QuickPool):
    """A block pool whose free queue is a `Queues`. It reports hits, new hashes and evictions to the policy."""

    free_block_queue: Queues

    def adopt_queues(self, policy_name: str, settings: CoreSettings, breaker: Breaker) -> None:
        """Replace the free queue of a pool that vLLM has built. Called once; blocks may be in use already."""
        free = self.free_block_queue.get_all_free_blocks()
        queues = Queues(self.blocks, policy_name, settings, breaker)
        queues.prepend_n([block for block in free if block.block_hash is None])
        queues.append_n([block for block in free if block.block_hash is not None])
        self.free_block_queue = queues
        breaker.on_trip(queues.by_age)

    @property
    def breaker(self) -> Breaker:
        return self.free_block_queue.breaker

    @property
    def extras_first(self) -> bool:
        """Whether blocks that stock keeps stay as long as in stock, so that extras only fill the rest of the pool."""
        return self.free_block_queue.policy.extras_first

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        queues = self.free_block_queue
        if self.metrics_collector:
            super().touch(blocks)
        else:
            queues.use_again(blocks)
        if queues.tells_hit:
            self.breaker.attempt(queues.policy.hit, _ids(blocks))

    def _insert_block_hash(
        self, block_hash_with_group_id: Any, block: KVCacheBlock, num_tokens: int | None
    ) -> None:
        queues = self.free_block_queue
        twin = self.cached_block_hash_to_block.get_one_block(block_hash_with_group_id)
        if twin is not None and queues.policy.extras_first and self.is_extra(twin):
            self._blank(twin)
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        if queues.tells_stored:
            self.breaker.attempt(
                queues.policy.stored, [block.block_id], [block_hash_with_group_id], twin is not None
            )

    def tell_stored(self, blocks: list[KVCacheBlock], keys: list[bytes]) -> None:
        if self.free_block_queue.tells_stored:
            self.breaker.attempt(self.free_block_queue.policy.stored, _ids(blocks), keys, False)

    def _blank(self, extra: KVCacheBlock) -> None:
        """Evict a free extra whose content was just computed again: lookups would find it instead of the new block."""
        if extra.ref_cnt or extra.block_id in self.cached_block_hashes_by_block:
            return
        self.free_block_queue.remove(extra)
        self._maybe_evict_cached_block(extra)
        self.free_block_queue.prepend_n([extra])

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        key = block._block_hash
        if not super()._maybe_evict_cached_block(block):
            return False
        if key is None:
            self.free_block_queue.grade_of[block.block_id] = WINDOW
        else:
            self.tell_evicted([block], [key])
        return True

    def tell_evicted(self, blocks: list[KVCacheBlock], keys: list[bytes]) -> None:
        queues = self.free_block_queue
        block_ids = _ids(blocks)
        if queues.tells_evicted:
            self.breaker.attempt(queues.policy.evicted, block_ids, keys)
        grade_of = queues.grade_of
        for block_id in block_ids:
            grade_of[block_id] = WINDOW

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        queues = self.free_block_queue
        queues.grade_of = bytearray(queues.num_blocks)
        queues.blank_all()
        self.breaker.attempt(queues.policy.reset)
        return True

    def grade(self, blocks: Sequence[KVCacheBlock], grades: Sequence[int]) -> None:
        """Set why these blocks are kept (policies.WINDOW, NEAR, FAR ..); -1 leaves a block's grade as it is."""
        grade_of = self.free_block_queue.grade_of
        for block, grade in zip(blocks, grades, strict=True):
            if grade >= 0:
                grade_of[block.block_id] = grade

    def is_extra(self, block: KVCacheBlock) -> bool:
        """Whether this block is an extra: stock would not keep it."""
        return bool(self.free_block_queue.grade_of[block.block_id])

    def is_output(self, block: KVCacheBlock) -> bool:
        """Whether this block is part of the window at an output's end."""
        return bool(self.free_block_queue.grade_of[block.block_id] == OUTPUT)

    def leave(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Tell the policy that a conversation went on past these blocks: its next turn resumes at a later block."""
        if self.free_block_queue.tells_left:
            self.breaker.attempt(self.free_block_queue.policy.left, _ids(blocks))

    def renew(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Move the free blocks among these to the tails of their queues, as if a prompt had just used them."""
        queues = self.free_block_queue
        for block in blocks:
            if not block.ref_cnt and not block.is_null:
                queues.remove(block)
                queues.append(block)

    @contextmanager
    def without_extras(self) -> Iterator[None]:
        """Within this context, lookups find only blocks that stock keeps."""
        get_one, is_extra = self.cached_block_hash_to_block.get_one_block, self.is_extra

        def ordinary(block_hash: bytes, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
            blocks = []
            for group in kv_cache_group_ids:
                block = get_one(block_hash + group.to_bytes(4, "big"))
                if block is None or is_extra(block):
                    return None
                blocks.append(block)
            return blocks

        self.get_cached_block = ordinary
        try:
            yield
        finally:
            del self.get_cached_block

    def counters(self) -> dict[str, int]:
        """Return counters for the run file: blocks given out per queue, and 1 for a tripped breaker."""
        queues = self.free_block_queue
        counts = {f"given_out_{name}": n for name, n in zip(queues.names, queues.taken[BLANK:], strict=True)}
        return {**counts, "pool_failures": int(self.breaker.tripped)}


def _ids(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]
