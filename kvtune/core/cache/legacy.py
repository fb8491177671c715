"""What vLLM did in older versions, brought back so that `kvtune evidence` can measure the difference. EngineCore.

| switch | brings back |
|---|---|
| legacy_empty_blocks | a new block list object, with one list per group, per request and step that allocates none |
| legacy_free_list | free blocks in a deque: removing a block that was hit searches from the head, O(free blocks) |

Contract: the same blocks in the same order as stock; only the objects made and the time differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvtune.core import state
from kvtune.core.patches import PATCHES
from kvtune.core.settings import CoreSettings
from kvtune.core.vllm_types import BlockPool

PART = "cache.legacy"


class LinearQueue:
    """Replaces stock's FreeKVCacheBlockQueue: the same order, but removing from the middle searches for the block."""

    def __init__(self, blocks: Sequence[KVCacheBlock], free: Iterable[KVCacheBlock]) -> None:
        self._blocks = blocks
        # Ids, because comparing two blocks compares all their fields.
        self._ids: deque[int] = deque(block.block_id for block in free)

    @property
    def num_free_blocks(self) -> int:
        return len(self._ids)

    def popleft(self) -> KVCacheBlock:
        return self._blocks[self._ids.popleft()]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        assert len(self._ids) >= n
        take = self._ids.popleft
        return [self._blocks[take()] for _ in range(n)]

    def remove(self, block: KVCacheBlock) -> None:
        self._ids.remove(block.block_id)

    def append(self, block: KVCacheBlock) -> None:
        self._ids.append(block.block_id)

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        self._ids.extend(block.block_id for block in blocks)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        self._ids.extendleft(block.block_id for block in reversed(blocks))

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [self._blocks[i] for i in self._ids]


def use_linear_queue(pool: BlockPool) -> None:
    """Exchange the free queue of a pool that stock has built."""
    free = pool.free_block_queue.get_all_free_blocks()
    pool.free_block_queue = LinearQueue(pool.blocks, free)


def _fresh_blocks(self: KVCacheManager, blocks: tuple[list[KVCacheBlock], ...]) -> KVCacheBlocks:
    return KVCacheBlocks(blocks)


def install(settings: CoreSettings) -> None:
    """Bring back what is switched on; `adopt` exchanges the queue when a manager is built."""
    uninstall()
    if settings.legacy_empty_blocks:
        PATCHES.replace(PART, KVCacheManager, "create_kv_cache_blocks", _fresh_blocks)
        state.part("legacy_empty_blocks", True)
    if settings.legacy_free_list:
        state.part("legacy_free_list", True)


def uninstall() -> None:
    """Undo `install`."""
    PATCHES.undo(PART)
