"""vLLM's BlockPool with several free queues; a policy chooses the queue to evict from. Runs in EngineCore."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core.breaker import Breaker
from kvtune.plugin.core.cache.queues import Queues
from kvtune.plugin.core.cache.quick import Filled, QuickPool
from kvtune.plugin.core.policies import OUTPUT, WINDOW


class PolicyPool(QuickPool):
    """A block pool whose free queue is a `Queues`. It reports hits, new hashes and evictions to the policy.

    Each method of vLLM's pool that reaches the queues is whole: if something raises in it, reference counts and hashes
    are as before the call, the pool is vLLM's own from then on (`stand_down`), and vLLM's method runs.
    """

    free_block_queue: Queues
    breaker: Breaker

    def adopt_queues(self, policy_name: str, settings: CoreSettings, breaker: Breaker) -> None:
        """Replace the free queue of a pool that vLLM has built. Called once; blocks may be in use already."""
        free = self.free_block_queue.get_all_free_blocks()
        try:
            queues = Queues(self.blocks, policy_name, settings)
            queues.prepend_n([block for block in free if block.block_hash is None])
            queues.append_n([block for block in free if block.block_hash is not None])
        except Exception:
            self.free_block_queue = FreeKVCacheBlockQueue(free)  # links the blocks again
            raise
        self.breaker = breaker
        self.free_block_queue = queues

    def stand_down(self) -> None:
        """Become vLLM's own pool with its one queue, for good; whatever the core's queues are like, no block is lost.

        Every block without a reference gets into the queue, in the order in which it would have been given out. A hash
        that only the block or only the map knows is dropped.
        """
        order: list[KVCacheBlock] = []
        with suppress(Exception):
            order = self.free_block_queue.in_order()
        ids = {block.block_id for block in order}
        lost = [block for block in self.blocks if block.block_id not in ids]
        self.__class__ = BlockPool
        self.__dict__.pop("get_cached_block", None)
        self.free_block_queue = FreeKVCacheBlockQueue([])
        for block in self.blocks:
            block.prev_free_block = block.next_free_block = None
        PolicyPool._drop_half_hashes(self)
        free = [block for block in (*lost, *order) if not block.ref_cnt and not block.is_null]
        self.free_block_queue.append_n([block for block in free if block.block_hash is None])
        self.free_block_queue.append_n([block for block in free if block.block_hash is not None])

    def _drop_half_hashes(self) -> None:
        by_hash, more = self.cached_block_hash_to_block, self.cached_block_hashes_by_block
        for block in self.blocks:
            key = block._block_hash
            if key is not None and not by_hash.contain(key, block.block_id):
                BlockPool._remove_cached_block_hashes(self, block)
        for key, listed in list(by_hash._cache.items()):
            for block in list(listed.values()) if isinstance(listed, dict) else [listed]:
                if block._block_hash != key and key not in more.get(block.block_id, ()):
                    by_hash.pop(key, block.block_id)

    @property
    def extras_first(self) -> bool:
        """Whether blocks that stock keeps stay as long as in stock, so that extras only fill the rest of the pool."""
        return self.free_block_queue.policy.extras_first

    # Methods of vLLM's pool. None uses `super`: the pool's class may have changed since the method was called.

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if num_blocks > self.get_num_free_blocks():
            return BlockPool.get_new_blocks(self, num_blocks)  # type: ignore[no-any-return]
        queues = self.free_block_queue
        queues.handed = []
        try:
            blocks = QuickPool.get_new_blocks(self, num_blocks)
        except Exception as error:
            for block in queues.handed:
                block.ref_cnt = 0
            self.breaker.trip(error)
            return BlockPool.get_new_blocks(self, num_blocks)  # type: ignore[no-any-return]
        self.breaker.settle()
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        counts = [block.ref_cnt for block in blocks]
        try:
            self._touch(blocks)
        except Exception as error:
            self._undo(error, blocks, counts)
            BlockPool.touch(self, blocks)
        self.breaker.settle()

    def _touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        queues = self.free_block_queue
        if self.metrics_collector:
            BlockPool.touch(self, blocks)
        else:
            queues.use_again(blocks)
        if queues.tells_hit:
            queues.policy.hit(_ids(blocks))

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        counts = [block.ref_cnt for block in blocks]
        try:
            QuickPool.free_blocks(self, blocks)
        except Exception as error:
            self._undo(error, blocks, counts)
            BlockPool.free_blocks(self, blocks)
        self.breaker.settle()

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        blocks = list(blocks)
        counts = [block.ref_cnt for block in blocks]
        try:
            BlockPool.unpin_blocks(self, blocks, on_reuse)
        except Exception as error:
            self._undo(error, blocks, counts)
            BlockPool.unpin_blocks(self, blocks, on_reuse)
        self.breaker.settle()

    def _undo(self, error: Exception, blocks: Sequence[KVCacheBlock], counts: Sequence[int]) -> None:
        """Give the blocks their reference counts back, and hand the pool back."""
        for block, count in zip(blocks, counts, strict=True):
            block.ref_cnt = count
        self.breaker.trip(error)

    def cache_full_blocks(self, *args: Any, **named: Any) -> None:
        filled = Filled(*args, **named)
        try:
            QuickPool.cache_full_blocks(self, *filled)
        except Exception as error:
            first = filled.num_cached_blocks
            blocks = filled.blocks[first : filled.num_full_blocks]
            self.forget_hashes(blocks, first, filled.block_size, filled.block_mask)
            self.breaker.trip(error)
            BlockPool.cache_full_blocks(self, *filled)
        self.breaker.settle()

    def forget_hashes(
        self, blocks: Sequence[KVCacheBlock], first: int, block_size: int, mask: Sequence[bool] | None = None
    ) -> None:
        """Take the hashes of whole blocks away from those blocks that `cache_full_blocks` was to give one."""
        for i, block in enumerate(blocks):
            whole = block._block_hash_num_tokens == (first + i + 1) * block_size
            if whole and not block.is_null and (mask is None or mask[i]):
                BlockPool._remove_cached_block_hashes(self, block)

    def reset_prefix_cache(self) -> bool:
        if not BlockPool.reset_prefix_cache(self):
            return False
        self.breaker.attempt(self._forget_all)
        return True

    def _forget_all(self) -> None:
        queues = self.free_block_queue
        queues.grade_of = bytearray(queues.num_blocks)
        queues.blank_all()
        queues.policy.reset()

    # Called by vLLM's pool for each block of a loop: what fails here is settled when the loop has ended.

    def _insert_block_hash(
        self, block_hash_with_group_id: Any, block: KVCacheBlock, num_tokens: int | None
    ) -> None:
        twin = self.breaker.later(self._blank_twin, block_hash_with_group_id)
        BlockPool._insert_block_hash(self, block_hash_with_group_id, block, num_tokens)
        self.breaker.later(self._tell_stored, [block], [block_hash_with_group_id], bool(twin))

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        key = block._block_hash
        evicted: bool = BlockPool._maybe_evict_cached_block(self, block)
        if evicted:
            self.breaker.later(self._tell_evicted, block, key)
        return evicted

    def _blank_twin(self, key: bytes) -> bool:
        """Return whether a block has this hash. Blank it if it is an extra, as its content was just computed again."""
        twin = self.cached_block_hash_to_block.get_one_block(key)
        if twin is not None and self.extras_first and self.is_extra(twin):
            self.blank(twin)
        return twin is not None

    def blank(self, extra: KVCacheBlock) -> None:
        """Evict an extra if it is free: it was just computed again, or a later one serves in its place."""
        if extra.ref_cnt or extra.block_id in self.cached_block_hashes_by_block:
            return
        self.free_block_queue.remove(extra)
        self._maybe_evict_cached_block(extra)
        self.free_block_queue.prepend_n([extra])

    def _tell_evicted(self, block: KVCacheBlock, key: bytes | None) -> None:
        if key is None:
            self.free_block_queue.grade_of[block.block_id] = WINDOW
        else:
            self.tell_evicted([block], [key])

    # Called by QuickPool.

    def tell_stored(self, blocks: list[KVCacheBlock], keys: list[bytes]) -> None:
        self._tell_stored(blocks, keys, False)

    def _tell_stored(self, blocks: list[KVCacheBlock], keys: list[bytes], resident: bool) -> None:
        if self.free_block_queue.tells_stored:
            self.free_block_queue.policy.stored(_ids(blocks), keys, resident)

    def tell_evicted(self, blocks: list[KVCacheBlock], keys: list[bytes]) -> None:
        queues = self.free_block_queue
        block_ids = _ids(blocks)
        if queues.tells_evicted:
            queues.policy.evicted(block_ids, keys)
        grade_of = queues.grade_of
        for block_id in block_ids:
            grade_of[block_id] = WINDOW

    # Called by the managers of windows and requests, within `attempt`.

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
            self.free_block_queue.policy.left(_ids(blocks))

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


def _ids(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]
