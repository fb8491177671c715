"""The tiered block pool: vLLM's BlockPool with its free queue replaced by tiers that a policy orders. EngineCore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvtune.core.cache.quick import QuickPool
from kvtune.core.cache.tiers import BLANK, Tiers
from kvtune.core.policies import NEAR, OUTPUT, OUTPUT_END, WINDOW
from kvtune.core.settings import CoreSettings

if TYPE_CHECKING:
    from vllm.v1.request import Request


class TieredPool(QuickPool):
    """vLLM's pool with Tiers as its free queue; it reports hits, hashes and evictions to the policy."""

    free_block_queue: Tiers

    def adopt_tiers(self, policy_name: str, settings: CoreSettings) -> None:
        """Called once, on a pool that stock has built; blocks may be in use already."""
        free = self.free_block_queue.get_all_free_blocks()
        tiers = Tiers(self.blocks, policy_name, settings)
        tiers.prepend_n([block for block in free if block.block_hash is None])
        tiers.append_n([block for block in free if block.block_hash is not None])
        self.free_block_queue = tiers
        self.as_stocks: set[int] = set()
        """Blocks of windows that have just replaced one that stock keeps."""

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        tiers = self.free_block_queue
        if self.metrics_collector:
            super().touch(blocks)
        else:
            tiers.use_again(blocks)
        if tiers.tells_hit:
            self.count_as_hit(blocks)

    def _insert_block_hash(
        self, block_hash_with_group_id: Any, block: KVCacheBlock, num_tokens: int | None
    ) -> None:
        tiers = self.free_block_queue
        if not tiers.tells_stored:
            super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
            return
        twin = self.cached_block_hash_to_block.get_one_block(block_hash_with_group_id)
        resident = twin is not None
        request = self.storing
        # A prompt's last token is computed whatever is cached, and so is its output.
        anyway = request is not None and (num_tokens or 0) >= request.num_prompt_tokens
        if resident and tiers.policy.replaces and twin.ref_cnt == 0 and block.block_hash is None:
            in_window = block_hash_with_group_id[-4:] in tiers.window_groups
            if in_window and tiers.grade_of[twin.block_id] == WINDOW:
                self.as_stocks.add(block.block_id)
            self._replace(twin, anyway)
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        try:
            tiers.policy.stored([block.block_id], [block_hash_with_group_id], resident, anyway)
        except Exception as error:
            tiers.policy_failed(error)

    def tell_stored(
        self, request: Request, blocks: list[KVCacheBlock], keys: list[bytes], tokens: int
    ) -> None:
        tiers = self.free_block_queue
        if not tiers.tells_stored:
            return
        in_output = tokens > request.num_prompt_tokens
        try:
            tiers.policy.stored([block.block_id for block in blocks], keys, False, in_output)
        except Exception as error:
            tiers.policy_failed(error)

    def _replace(self, twin: KVCacheBlock, anyway: bool) -> None:
        """Make a free block blank, because its content was just computed again in another block."""
        tiers = self.free_block_queue
        if twin.is_null or twin.block_id in self.cached_block_hashes_by_block:
            return
        tiers.remove(twin)
        super()._maybe_evict_cached_block(twin)
        tiers.grade_of[twin.block_id] = 0
        tiers.prepend_n([twin])
        try:
            tiers.policy.replaced(twin.block_id, anyway)
        except Exception as error:
            tiers.policy_failed(error)

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        key = block._block_hash
        if not super()._maybe_evict_cached_block(block):
            return False
        if key is None:
            self.free_block_queue.grade_of[block.block_id] = 0
        else:
            self.tell_evicted([block], [key])
        return True

    def tell_evicted(self, blocks: list[KVCacheBlock], keys: list[bytes]) -> None:
        tiers = self.free_block_queue
        block_ids = [block.block_id for block in blocks]
        if tiers.tells_evicted:
            try:
                tiers.policy.evicted(block_ids, keys)
            except Exception as error:
                tiers.policy_failed(error)
        grade_of = tiers.grade_of
        for block_id in block_ids:
            grade_of[block_id] = 0

    def reset_prefix_cache(self) -> bool:
        if not super().reset_prefix_cache():
            return False
        tiers = self.free_block_queue
        tiers.grade_of = bytearray(tiers.num_blocks)
        tiers.blank_all()
        try:
            tiers.policy.reset()
        except Exception as error:
            tiers.policy_failed(error)
        return True

    def grade(self, blocks: Sequence[KVCacheBlock], grades: Sequence[int]) -> None:
        """Set why these blocks are kept (policies.WINDOW, NEAR, FAR ..); -1 leaves a block's grade as it is.

        What has just replaced a block that stock keeps is kept as that was.
        """
        grade_of = self.free_block_queue.grade_of
        for block, grade in zip(blocks, grades, strict=True):
            if grade >= 0:
                grade_of[block.block_id] = WINDOW if block.block_id in self.as_stocks else grade
        self.as_stocks.clear()

    def grade_of(self, block: KVCacheBlock) -> int:
        return int(self.free_block_queue.grade_of[block.block_id])

    def count_as_hit(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._tell(self.free_block_queue.policy.hit, blocks)

    def expect(self, blocks: Sequence[KVCacheBlock]) -> None:
        """A conversation that went on before is likely to go on behind these blocks."""
        self._tell(self.free_block_queue.policy.expected, blocks)

    def retire(self, blocks: Sequence[KVCacheBlock]) -> None:
        """A conversation goes on behind these blocks, which were hit: they are not expected to be hit again."""
        self._tell(self.free_block_queue.policy.retired, blocks)

    def need(self, blocks: Sequence[KVCacheBlock]) -> None:
        """These are part of the window at its prompt's end, too, though they were retired."""
        self._tell(self.free_block_queue.policy.needed, blocks)

    def _tell(self, hook: Callable[[list[int]], None], blocks: Sequence[KVCacheBlock]) -> None:
        try:
            hook([block.block_id for block in blocks])
        except Exception as error:
            self.free_block_queue.policy_failed(error)

    def resumed(self, blocks: Sequence[KVCacheBlock]) -> None:
        """A prompt hit these blocks of a window group; those out of the window are null."""
        tiers = self.free_block_queue
        window = [block.block_id for block in blocks if not block.is_null]
        grades = [tiers.grade_of[block_id] for block_id in window]
        kept = sum(grade in (OUTPUT, OUTPUT_END) for grade in grades)
        try:
            tiers.policy.resumed(len(blocks), kept, grades[-1])
        except Exception as error:
            tiers.policy_failed(error)
        for block_id, grade in zip(window, grades, strict=True):
            # From the second visit on stock keeps it, too.
            if grade == NEAR:
                tiers.grade_of[block_id] = WINDOW

    def counters(self) -> dict[str, int]:
        """Counters for the run file: blocks given out by tier, demotions, failures."""
        tiers = self.free_block_queue
        counts = {f"given_out_{name}": n for name, n in zip(tiers.names, tiers.taken[BLANK:], strict=True)}
        counts |= {"demotions": sum(tiers.demoted), "pool_failures": tiers.failures}
        return counts | tiers.policy.counters()
