"""What a policy hears of stored blocks: which were there already, and which are computed whatever is cached."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.core.block_pool import BlockPool

    from kvtune.core.cache.pool import TieredPool
    from kvtune.core.settings import CoreSettings
    from tests.core.cache.test_pool_machine import Hashes

pytestmark = pytest.mark.vllm
SIZE = 4


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pool of density that keeps what its policy is told, as (block ids, resident, anyway)."""
    pool: Any = BlockPool(32, enable_caching=True, hash_block_size=SIZE)
    pool.__class__ = TieredPool
    pool.adopt_tiers("density", CoreSettings())
    pool.told = []
    policy = pool.free_block_queue.policy
    stored = policy.stored

    def tell(block_ids: list[int], keys: list[bytes], resident: bool, anyway: bool) -> None:
        pool.told.append((list(block_ids), resident, anyway))
        stored(block_ids, keys, resident, anyway)

    monkeypatch.setattr(policy, "stored", tell)
    return pool


def test_a_prompts_blocks_are_evidence_and_its_outputs_are_not(pool: Any) -> None:
    blocks = pool.get_new_blocks(4)
    ids = [block.block_id for block in blocks]
    request = Hashes([1, 2, 3, 4], prompt_tokens=2 * SIZE + 1)
    pool.cache_full_blocks(request, blocks, 0, 2, SIZE, 0)
    pool.cache_full_blocks(request, blocks, 2, 3, SIZE, 0)
    pool.cache_full_blocks(request, blocks, 3, 4, SIZE, 0)
    assert pool.told == [(ids[:2], False, False), (ids[2:3], False, True), (ids[3:], False, True)]


def test_the_block_of_a_prompts_last_token_is_no_evidence_either(pool: Any) -> None:
    first, again = pool.get_new_blocks(2), pool.get_new_blocks(2)
    request = Hashes([1, 2], prompt_tokens=2 * SIZE)
    pool.cache_full_blocks(request, first, 0, 2, SIZE, 0)
    pool.told.clear()
    pool.cache_full_blocks(request, again, 0, 2, SIZE, 0)
    ids = [block.block_id for block in again]
    assert pool.told == [(ids[:1], True, False), (ids[1:], True, True)]


def test_what_is_stored_outside_of_a_request_is_not_judged_by_the_last_one(pool: Any) -> None:
    """vLLM moves hashes from block to block, and stores parts of blocks: those may be of another request."""
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(Hashes([1], prompt_tokens=1), blocks, 0, 1, SIZE, 0)
    with pytest.raises(AssertionError):  # stock's: a block can not become full twice
        pool.cache_full_blocks(Hashes([9], prompt_tokens=1), blocks, 0, 1, SIZE, 0)
    pool.told.clear()
    pool.move_block_hashes(*blocks)
    assert pool.told == [([blocks[1].block_id], False, False)]
