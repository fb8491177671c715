"""Two hooks into requests: at the lookup (what would stock hit?) and at the end (keep the last window). EngineCore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from kvtune.plugin.core.breaker import Breaker
from kvtune.plugin.core.cache.states import KeepingStateManager
from kvtune.plugin.core.cache.windows import KeepingWindowManager
from kvtune.plugin.vllm.types import KVCacheBlock

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks


class KeepingManager(KVCacheManager):  # type: ignore[misc]
    """vLLM's manager with two hooks: after a lookup that hits an extra, and before a request's blocks are freed.

    No method uses `super`: after an error in a method that it calls, its class is vLLM's.
    """

    windows: tuple[KeepingWindowManager, ...]
    states: tuple[KeepingStateManager, ...]
    keeps_output: bool
    kvtune_breaker: Breaker

    def stand_down(self) -> None:
        """Become vLLM's own manager, for good."""
        self.__class__ = KVCacheManager

    def get_computed_blocks(self, request: Request, *limit: int | None) -> tuple[KVCacheBlocks, int, int]:
        computed: tuple[KVCacheBlocks, int, int] = KVCacheManager.get_computed_blocks(self, request, *limit)
        if not computed[1] or self.kvtune_breaker.tripped:
            return computed
        return self.kvtune_breaker.attempt(self._as_in_stock, computed, request, *limit) or computed

    def _as_in_stock(
        self, computed: tuple[KVCacheBlocks, int, int], request: Request, *limit: int | None
    ) -> tuple[KVCacheBlocks, int, int]:
        """If the hit includes an extra, also apply the effects of stock's own (shorter) hit.

        The blocks that stock would hit become the most recently used. The shared prefix ends (third value of the
        result) where stock says it ends, if that is later.
        """
        blocks, tokens, junction = computed
        pool = self.block_pool
        if not pool.extras_first:
            return computed
        groups: tuple[KeepingWindowManager | KeepingStateManager, ...] = (*self.windows, *self.states)
        hit = [blocks.blocks[group.kv_cache_group_id][-group.need :] for group in groups]
        if not any(pool.is_extra(block) for window in hit for block in window):
            return computed
        with pool.without_extras():
            stocks, _, stocks_junction = KVCacheManager.get_computed_blocks(self, request, *limit)
        goes_on = any(pool.is_output(block) for window in hit for block in window[-1:])
        for group in groups:
            window = stocks.blocks[group.kv_cache_group_id][-group.need :]
            if goes_on:
                pool.leave(window)
            pool.renew(window[::-1])
        return blocks, tokens, max(junction, stocks_junction)

    def free(self, request: Request) -> None:
        self.kvtune_breaker.attempt(self._keep_windows, request)
        KVCacheManager.free(self, request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        self.kvtune_breaker.attempt(self._keep_windows, request)
        blocks: list[KVCacheBlock] = KVCacheManager.pop_blocks_for_free(self, request)
        return blocks

    def _keep_windows(self, request: Request) -> None:
        if self.keeps_output:
            for group in self.windows:
                group.keep_output(request)
