"""A pool with runs beside vLLM's own: the same requests to both managers, then the same blocks, hits and queue."""

from __future__ import annotations

import random
import zlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtune.lab.sim.chains import BlockHashes, Chains
from kvtune.requests.types import Request
from tests.choice import first_of

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

SIZE = 4


class Prompt:
    """As much of vLLM's Request as a manager reads. Hashes are chained: equal ones have equal hashes before them."""

    def __init__(self, name: int, words: list[int], chains: Chains) -> None:
        self.request_id, self.words = str(name), words
        self.num_prompt_tokens = SIZE * len(words) + 1
        self.shared_prefix_boundary = 0
        numbers = [zlib.crc32(repr(words[: at + 1]).encode()) for at in range(len(words))]
        chain = chains.make(0, np.array(numbers, np.uint64))
        self.block_hashes = BlockHashes(chain.hashes)
        self.block_hashes.chain = chain


class Side:
    """One pool of `count` blocks with a manager of full attention, and the requests that hold blocks."""

    def __init__(self, count: int, quick: bool) -> None:
        import torch
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from kvtune.lab.sim.fast.pool import adopt

        self.spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=1, dtype=torch.float16)
        self.pool: Any = BlockPool(count, enable_caching=True, hash_block_size=SIZE)
        self.manager: Any = FullAttentionManager(
            self.spec, self.pool, enable_caching=True, kv_cache_group_id=0, scheduler_block_size=SIZE
        )
        if quick:
            coordinator = SimpleNamespace(single_type_managers=(self.manager,))
            adopt(SimpleNamespace(block_pool=self.pool, coordinator=coordinator, enable_caching=True))

    def hit(self, prompt: Prompt, most: int) -> Any:
        (blocks,), tokens = self.manager.find_longest_cache_hit(
            block_hashes=prompt.block_hashes,
            max_length=most,
            kv_cache_group_ids=[0],
            block_pool=self.pool,
            kv_cache_spec=self.spec,
            drop_eagle_block=False,
            alignment_tokens=SIZE,
        )
        assert tokens == SIZE * len(blocks)
        return blocks

    def begin(self, prompt: Prompt, most: int, dropped: int) -> tuple[int, ...] | None:
        """Let a request in, as `allocate_slots` does, with all blocks of its prompt. None: it does not fit."""
        name, blocks = prompt.request_id, self.hit(prompt, most)
        del blocks[len(blocks) - min(dropped, len(blocks)) :]  # another group hits less
        tokens, hits = SIZE * len(prompt.words) + 1, SIZE * len(blocks)
        needed = self.manager.get_num_blocks_to_allocate(name, tokens, blocks, hits, hits, tokens)
        if needed > self.pool.get_num_free_blocks():
            return None
        self.manager.add_local_computed_blocks(name, blocks, hits, 0)
        self.manager.allocate_new_blocks(name, tokens, tokens)
        return (needed, hits, *(block.block_id for block in self.manager.req_to_blocks[name]))

    def cache(self, prompt: Prompt, upto: int) -> None:
        """Give the blocks of the first `upto` tokens their hashes."""
        self.manager.cache_blocks(prompt, upto, replay_boundaries=())

    def end(self, name: str) -> None:
        self.manager.free(name)

    def state(self) -> object:
        """Return the queue, the map and each block's hash."""
        blocks = self.pool.blocks
        entries = self.pool.cached_block_hash_to_block._cache.items()
        return (
            [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()],
            self.pool.get_num_free_blocks(),
            {key: [*entry] if isinstance(entry, dict) else entry.block_id for key, entry in entries},
            [(block._block_hash, block._block_hash_num_tokens) for block in blocks],
        )

    def counts(self) -> list[int]:
        from kvtune.lab.sim.fast.runs import IN_RUN

        counts = [block.ref_cnt for block in self.pool.blocks]
        for run in getattr(self.pool, "runs", {}).values():
            for block in run.blocks:
                assert counts[block.block_id] == IN_RUN
                counts[block.block_id] = len(run.holders)
        return counts

    def links(self) -> list[tuple[int | None, ...]]:
        return [
            tuple(
                None if node is None else node.block_id
                for node in (block.prev_free_block, block.next_free_block)
            )
            for block in self.pool.blocks
        ]


@pytest.mark.parametrize("seed", first_of(range(8)))
def test_runs_are_vllms_blocks(seed: int) -> None:
    """Prompts that share their beginnings, one content several times, hits that others shorten, a pool that evicts."""
    rng = random.Random(seed)
    stock, quick = Side(90, False), Side(90, True)
    made = Chains([Request("", (), 1)])
    running: dict[str, tuple[Prompt, int]] = {}
    partial = twice = split = 0
    for number in range(700):
        words = [rng.randrange(2) for _ in range(rng.randrange(1, 12))] + rng.choice(
            ([], [7] * 9, [*range(9)])
        )
        prompt = Prompt(number, words, made)
        most = rng.choice((0, SIZE, 5 * SIZE, 99 * SIZE, 99 * SIZE))
        dropped = rng.choice((0, 0, 0, 1, 3))
        if rng.random() < 0.5:
            taken = stock.begin(prompt, most, dropped)
            assert taken == quick.begin(prompt, most, dropped)
            if taken is not None:
                running[prompt.request_id] = prompt, taken[1]
                partial += 0 < taken[1] < SIZE * len(words)
        elif running and rng.random() < 0.5:
            name = rng.choice(list(running))
            del running[name]
            stock.end(name)
            quick.end(name)
        elif running:
            name = rng.choice(list(running))
            prompt, upto = running[name]
            upto = min(upto + rng.randrange(0, 30), SIZE * len(prompt.words))
            running[name] = prompt, upto
            stock.cache(prompt, upto)
            quick.cache(prompt, upto)
        assert stock.state() == quick.state()
        assert stock.counts() == quick.counts()
        twice += any(isinstance(entry, list) for entry in stock.state()[2].values())  # type: ignore[index]
        split += any(run.first for run in quick.pool.runs.values())
    assert min(partial, twice, split) > 20
    quick.pool.dissolve()
    assert stock.state() == quick.state() and stock.counts() == quick.counts()
    assert stock.links() == quick.links()
