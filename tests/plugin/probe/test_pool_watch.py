"""Evictions, counted on fake pools; tests/plugin/core does so on vLLM's pool and the core's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtune.plugin.probe.pool import PoolWatch


class Queue:
    """A free queue as vLLM's: blocks with and without a hash."""

    def __init__(self, hashes: str) -> None:
        self.blocks = [SimpleNamespace(_block_hash=None if h == "." else h) for h in hashes]

    def popleft_n(self, n: int) -> list[SimpleNamespace]:
        taken, self.blocks = self.blocks[:n], self.blocks[n:]
        return taken


def pool_of(queue: object) -> SimpleNamespace:
    return SimpleNamespace(free_block_queue=queue)


def test_stock_evicts_the_hashed_blocks_that_it_gives_out() -> None:
    pool = pool_of(Queue("..ab.c.."))
    watch = PoolWatch(pool)
    assert watch.queues == ("least recently used",)
    assert watch.news() is None
    assert len(pool.free_block_queue.popleft_n(4)) == 4
    assert watch.news() == (2,)
    pool.free_block_queue.popleft_n(1)
    assert watch.news() is None, "a block without a hash is no eviction"
    pool.free_block_queue.popleft_n(2)
    assert watch.news() == (1,)


def test_the_cores_queues_count_by_themselves() -> None:
    queues = SimpleNamespace(names=("blank", "probation", "protected"), taken=[0, 9, 4, 0])
    watch = PoolWatch(pool_of(queues))
    assert watch.queues == ("probation", "protected")
    assert watch.news() is None, "what was before is not news"
    queues.taken[1] += 100
    assert watch.news() is None, "blank blocks held nothing"
    queues.taken[2] += 3
    queues.taken[3] += 2
    assert watch.news() == (3, 2)
    assert watch.news() is None


def test_more_queues_than_a_record_holds_are_refused() -> None:
    names = ("blank", *"abcdefg")
    with pytest.raises(ValueError, match="7 queues"):
        PoolWatch(pool_of(SimpleNamespace(names=names, taken=[0] * 9)))
