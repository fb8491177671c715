"""A quick pool and group beside vLLM's own: the same calls to both, then the same blocks, hits and queue."""

from __future__ import annotations

import random
import warnings
import zlib
from typing import Any

import numpy as np
import pytest

from kvtune.lab.sim.chains import BlockHashes, Chains
from kvtune.requests.types import Request
from tests.choice import first_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

SIZE = 4


class Prompt:
    """As much of a Request as cache_full_blocks reads. Hashes are chained: equal ones have equal hashes before them."""

    def __init__(self, names: list[int], chains: Chains) -> None:
        self.num_prompt_tokens = SIZE * len(names)
        numbers = [zlib.crc32(repr(names[: at + 1]).encode()) for at in range(len(names))]
        chain = chains.make(0, np.array(numbers, np.uint64))
        self.block_hashes = BlockHashes(chain.hashes)
        self.block_hashes.chain = chain


def chains() -> Chains:
    return Chains([Request("", (), 1)])


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


@pytest.mark.parametrize("seed", first_of(range(6)))
def test_quick_blocks_are_vllms(seed: int) -> None:
    """Prompts that share their beginnings, several blocks of one content, a pool that evicts all the time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

        from kvtune.lab.sim.fast.pool import QuickGroup
        from kvtune.plugin.core.cache.quick import QuickPool
    rng = random.Random(seed)
    stock, quick = (
        Side(40, pool, group) for pool, group in ((BlockPool, FullAttentionManager), (QuickPool, QuickGroup))
    )
    partial = twice = 0
    made = chains()
    for _ in range(600):
        prompt = Prompt([rng.randrange(3) for _ in range(rng.randrange(1, 8))], made)
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


@pytest.mark.parametrize("seed", range(2))
def test_searches_in_several_groups_find_what_vllms_find(seed: int) -> None:
    """Full attention and windows, one and several groups of a kind, EAGLE's drop, hits that must end at some blocks."""
    import torch
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

    from kvtune.lab.sim.fast.pool import QuickGroup, QuickWindow
    from kvtune.plugin.core.cache.quick import QuickPool

    rng = random.Random(seed)
    shape = {"block_size": SIZE, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float16}
    made, lengths = chains(), set()
    for _ in range(400):
        pool: Any = BlockPool(120, enable_caching=True, hash_block_size=SIZE)
        pool.__class__ = QuickPool
        prompt = Prompt([rng.randrange(2) for _ in range(rng.randrange(1, 14))], made)
        count = len(prompt.block_hashes)
        for group in range(3):
            for _ in range(rng.randrange(1, 3)):  # the same content twice
                mask = [rng.random() < rng.choice((0.5, 0.9, 1.0)) for _ in range(count)]
                pool.cache_full_blocks(prompt, pool.get_new_blocks(count), 0, count, SIZE, group, mask)
        groups = rng.sample(range(3), rng.randrange(1, 4))
        call = {
            "block_hashes": prompt.block_hashes,
            "max_length": rng.randrange(SIZE * count + 1),
            "kv_cache_group_ids": groups,
            "block_pool": pool,
            "drop_eagle_block": rng.random() < 0.4,
            "alignment_tokens": SIZE * rng.choice((1, 1, 2, 3)),
        }
        window = SlidingWindowSpec(**shape, sliding_window=rng.choice((1, 2, SIZE, 3 * SIZE, 5 * SIZE + 1)))
        for stock, quick, spec in (
            (FullAttentionManager, QuickGroup, FullAttentionSpec(**shape)),
            (SlidingWindowManager, QuickWindow, window),
        ):
            one, other = (kind.find_longest_cache_hit(kv_cache_spec=spec, **call) for kind in (stock, quick))
            assert [[b.block_id for b in g] for g in one[0]] == [[b.block_id for b in g] for g in other[0]]
            assert one[1] == other[1]
            lengths.add((quick, one[1]))
    assert len(lengths) > 12


def test_chains_share_what_prompts_share() -> None:
    """A prompt has the objects of the prompt before it, up to where they differ, and the hashes of its own numbers."""
    numbers = np.arange(10, dtype=np.uint64)
    turns = [Request("0", (), 1), Request("1", (), 1, after=(0,)), Request("2", (), 1, after=(1,))]
    made = Chains(turns)
    first = made.make(0, numbers[:4])
    first.keys(7)
    second = made.make(1, numbers)
    assert all(one is other for one, other in zip(first.hashes, second.hashes, strict=False))
    assert all(one is other for one, other in zip(first.keys(7), second.keys(7), strict=False))
    changed = numbers.copy()
    changed[3:] += 100
    third = made.make(2, changed)
    for chain, array in ((second, numbers), (third, changed)):
        assert chain.hashes == [int(number).to_bytes(8, "little") for number in array]
        assert chain.keys(7) == [block_hash + bytes((0, 0, 0, 7)) for block_hash in chain.hashes]
    assert third.hashes[2] is second.hashes[2] and third.hashes[3] != second.hashes[3]


def test_the_groups_of_vllms_classes_and_their_pool_become_quick() -> None:
    pytest.importorskip("vllm")
    from kvtune.lab.setup.setup import Setup, Simulated
    from kvtune.lab.sim.build import build
    from kvtune.lab.sim.clock import VirtualClock

    flags = ["--max-model-len", "2048", "--num-gpu-blocks-override", "300"]
    for model, shortcuts, names in (
        ("tiny-llama", True, {"QuickGroup"}),
        ("tiny-llama", False, {"FullAttentionManager"}),
        ("gemma-3-4b", True, {"QuickGroup", "QuickWindow"}),
        ("gemma-3-4b", False, {"FullAttentionManager", "SlidingWindowManager"}),
    ):
        setup = Setup(model=model, engine_args=flags, device=Simulated(shortcuts=shortcuts))
        engine = build(setup, VirtualClock())
        try:
            coordinator = engine.scheduler.kv_cache_manager.coordinator
            assert {type(group).__name__ for group in coordinator.single_type_managers} == names
            searched = [group.manager_cls.__name__ for group in getattr(coordinator, "attention_groups", ())]
            assert not searched or set(searched) == names
        finally:
            engine.scheduler.shutdown()
