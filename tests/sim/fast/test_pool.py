"""A quick pool and group beside vLLM's own: the same calls to both, then the same blocks, hits and queue."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

SIZE = 4


class Prompt:
    """As much of a Request as cache_full_blocks reads. Hashes are chained: equal ones have equal hashes before them."""

    def __init__(self, names: list[int]) -> None:
        self.num_prompt_tokens = SIZE * len(names)
        self.block_hashes = [repr(names[: at + 1]).encode() for at in range(len(names))]


class Side:
    """One pool with the class of its group, and the blocks that requests hold."""

    def __init__(self, blocks: int, pool_class: type, group_class: Any) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self.pool: Any = BlockPool(blocks, enable_caching=True, hash_block_size=SIZE)
        self.pool.__class__ = pool_class
        self.group = group_class
        self.held: list[list[Any]] = []

    def hit(self, prompt: Prompt, most: int) -> list[Any]:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16)
        (found,), tokens = self.group.find_longest_cache_hit(
            block_hashes=prompt.block_hashes,
            max_length=most,
            kv_cache_group_ids=[0],
            block_pool=self.pool,
            kv_cache_spec=spec,
            drop_eagle_block=False,
            alignment_tokens=SIZE,
        )
        assert tokens == SIZE * len(found)
        return list(found)

    def begin(self, prompt: Prompt, most: int) -> list[int]:
        found = self.hit(prompt, most)
        self.pool.touch(found)
        new = self.pool.get_new_blocks(len(prompt.block_hashes) - len(found))
        self.pool.cache_full_blocks(prompt, found + new, len(found), len(prompt.block_hashes), SIZE, 0)
        self.held.append(found + new)
        return [block.block_id for block in found + new]

    def end(self, at: int) -> None:
        self.pool.free_blocks(reversed(self.held.pop(at)))

    def queue(self) -> list[tuple[int, object]]:
        return [
            (block.block_id, block.block_hash) for block in self.pool.free_block_queue.get_all_free_blocks()
        ]


@pytest.mark.parametrize("seed", range(6))
def test_quick_blocks_are_vllms(seed: int) -> None:
    """Prompts that share their beginnings, several blocks of one content, a pool that evicts all the time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        from kvtune.core.cache.quick import QuickPool
        from kvtune.sim.fast.pool import QuickGroup
    rng = random.Random(seed)
    stock, quick = (
        Side(40, pool, group) for pool, group in ((BlockPool, FullAttentionManager), (QuickPool, QuickGroup))
    )
    partial = twice = 0
    for _ in range(600):
        prompt = Prompt([rng.randrange(3) for _ in range(rng.randrange(1, 8))])
        # A search that ends early leaves blocks of a content that the pool has: there are then two.
        most = rng.choice((0, 1, SIZE, 5 * SIZE, 99 * SIZE))
        if rng.random() < 0.6 and stock.pool.get_num_free_blocks() >= len(prompt.block_hashes) + 8:
            assert stock.begin(prompt, most) == quick.begin(prompt, most)
        elif stock.held:
            at = rng.randrange(len(stock.held))
            stock.end(at)
            quick.end(at)
        found = [[block.block_id for block in side.hit(prompt, 99 * SIZE)] for side in (stock, quick)]
        assert found[0] == found[1]
        partial += 0 < len(found[0]) < len(prompt.block_hashes)
        twice += any(isinstance(one, dict) for one in stock.pool.cached_block_hash_to_block._cache.values())
        assert stock.queue() == quick.queue()
        assert stock.pool.get_num_free_blocks() == quick.pool.get_num_free_blocks() == len(quick.queue())
        for one, other in zip(stock.pool.blocks, quick.pool.blocks, strict=True):
            assert (one.ref_cnt, one.block_hash) == (other.ref_cnt, other.block_hash)
    assert partial > 20 and twice > 20


def test_a_lone_group_and_its_pool_become_quick_and_others_stay() -> None:
    pytest.importorskip("vllm")
    from kvtune.engine.setup import Setup, Simulated
    from kvtune.sim.build import build
    from kvtune.sim.clock import VirtualClock

    flags = ["--max-model-len", "2048", "--num-gpu-blocks-override", "300"]
    for model, shortcuts, names in (
        ("tiny-llama", True, {"QuickGroup"}),
        ("tiny-llama", False, {"FullAttentionManager"}),
        ("gemma-3-4b", True, {"FullAttentionManager", "SlidingWindowManager"}),
    ):
        setup = Setup(model=model, engine_args=flags, device=Simulated(shortcuts=shortcuts))
        engine = build(setup, VirtualClock())
        try:
            groups = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
            assert {type(group).__name__ for group in groups} == names
        finally:
            engine.scheduler.shutdown()
