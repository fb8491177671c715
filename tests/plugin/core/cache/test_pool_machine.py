"""A state machine drives the pool against vLLM's own BlockPool: same calls to both, then the invariants.

With policy lru the block ids must be stock's; with the others all that a caller can see must be.
100,000 operations: KVTUNE_EXAMPLES=50 pytest tests/plugin/core/cache/test_pool_machine.py --timeout 0.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.core.block_pool import BlockPool

    from bench import audit
    from kvtune.data.knobs import POLICIES, CoreSettings
    from kvtune.plugin.core import state
    from kvtune.plugin.core.breaker import Breaker
    from kvtune.plugin.core.cache.pool import PolicyPool
    from kvtune.plugin.core.cache.queues import BLANK
    from kvtune.plugin.vllm.plugin_state import STATE
from tests.choice import TIMES, drawn

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
EXAMPLES, STEPS = drawn(15), 40


class Hashes:
    """As much of a Request as cache_full_blocks reads."""

    def __init__(self, names: list[int], prompt_tokens: int) -> None:
        self.num_prompt_tokens = prompt_tokens
        self.block_hashes = [b"%032d" % name for name in names]


class PoolMachine(RuleBasedStateMachine):
    policy = "lru"
    operations = 0

    @initialize(blocks=st.integers(1, 24), bonus=st.sampled_from((0.0, 1.0, 50.0, 1e9)))
    def build(self, blocks: int, bonus: float) -> None:
        self.now = 0.0
        state.books().clock = lambda: self.now
        self.stock = BlockPool(blocks, enable_caching=True, hash_block_size=4)
        self.ours = BlockPool(blocks, enable_caching=True, hash_block_size=4)
        self.foreign = BlockPool(4, enable_caching=True, hash_block_size=4)
        self.ours.__class__ = PolicyPool
        self.ours.adopt_queues(self.policy, CoreSettings(reuse_bonus_s=bonus, ghost_factor=2.0), Breaker())
        self.held: list[tuple[list[Any], list[Any]]] = []
        self.loans: list[Any] = []

    def teardown(self) -> None:
        if hasattr(self, "held"):
            for stock, ours in self.held:
                self.stock.free_blocks(stock)
                self.ours.free_blocks(ours)
            assert self.ours.get_num_free_blocks() == self.ours.num_gpu_blocks - 1
            assert audit.violations(self.ours) == []
            assert not self.ours.breaker.tripped
        STATE.reset()

    @rule(count=st.integers(0, 10))
    def allocate(self, count: int) -> None:
        if count > self.stock.get_num_free_blocks():
            for pool in (self.stock, self.ours):
                with pytest.raises(ValueError, match="Cannot get"):
                    pool.get_new_blocks(count)
            return
        pair = self.stock.get_new_blocks(count), self.ours.get_new_blocks(count)
        assert all(block.ref_cnt == 1 and block.block_hash is None for block in pair[1])
        self.held.append(pair)

    @rule(data=st.data(), names=st.lists(st.integers(0, 12), min_size=10, max_size=10))
    def cache(self, data: st.DataObject, names: list[int]) -> None:
        """The first blocks of one holding become full; some are masked out; some hashes are there already."""
        fresh = [pair for pair in self.held if pair[0] and all(b.block_hash is None for p in pair for b in p)]
        if not fresh:
            return
        pair = data.draw(st.sampled_from(fresh))
        full = data.draw(st.integers(1, len(pair[0])))
        mask = data.draw(st.lists(st.booleans(), min_size=full, max_size=full))
        grades = data.draw(st.lists(st.integers(-1, 4), min_size=full, max_size=full))
        request = Hashes(names, prompt_tokens=data.draw(st.integers(0, 4 * full)))
        for pool, blocks in ((self.stock, pair[0]), (self.ours, pair[1])):
            pool.cache_full_blocks(request, blocks, 0, full, 4, 0, block_mask=mask)
        self.ours.grade(pair[1][:full], grades)

    @rule(name=st.integers(0, 12))
    def hit(self, name: int) -> None:
        cached = [pool.get_cached_block(b"%032d" % name, [0]) for pool in (self.stock, self.ours)]
        if self.policy == "lru":
            assert (cached[0] is None) == (cached[1] is None)
        if cached[0] is None or cached[1] is None:
            return
        # Of two blocks with one hash, which is found depends on which was evicted; one may be in use, the other free.
        in_use = [blocks[0].ref_cnt > 0 for blocks in cached]
        assert self.policy != "lru" or in_use[0] == in_use[1]
        if in_use[0] != in_use[1]:
            return
        self.stock.touch(cached[0])
        self.ours.touch(cached[1])
        self.held.append((cached[0], cached[1]))

    @rule(data=st.data(), seconds=st.floats(0, 100))
    def free(self, data: st.DataObject, seconds: float) -> None:
        """In any order, part of a holding or all of it, now and then with a block that another pool lent."""
        if not self.held:
            return
        self.now += seconds
        index = data.draw(st.integers(0, len(self.held) - 1))
        stock, ours = self.held.pop(index)
        order = data.draw(st.permutations(range(len(stock))))
        part = order[: data.draw(st.integers(0, len(order)))]
        rest = [i for i in range(len(stock)) if i not in part]
        loan = self.loans.pop() if self.loans else None
        extra = [loan] if loan is not None else []
        self.stock.free_blocks([stock[i] for i in part])
        self.ours.free_blocks([*(ours[i] for i in part), *extra])
        if loan is not None:
            assert loan.ref_cnt == 0
        if rest:
            self.held.append(([stock[i] for i in rest], [ours[i] for i in rest]))

    @rule()
    def lend(self) -> None:
        if self.foreign.get_num_free_blocks():
            self.loans += self.foreign.get_new_blocks(1)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        """Released, readable until reused: they join the tail of the queue, hashed or not."""
        if not self.held:
            return
        stock, ours = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        told: list[int] = []
        self.stock.unpin_blocks(stock, lambda block: None)
        self.ours.unpin_blocks(ours, lambda block: told.append(block.block_id))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        ids = data.draw(st.sets(st.integers(0, self.stock.num_gpu_blocks - 1), max_size=5))
        self.stock.evict_blocks(ids)
        self.ours.evict_blocks(ids)

    @rule()
    def reset(self) -> None:
        done = self.ours.reset_prefix_cache()
        assert done == self.stock.reset_prefix_cache()
        if done:
            queues = self.ours.free_block_queue
            assert queues.queues[BLANK].num_free_blocks == queues.num_free_blocks

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.held:
            self.ours.leave(self.held[data.draw(st.integers(0, len(self.held) - 1))][1])

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        """Free blocks become the youngest, as a touch and a release would make them in stock."""
        names = data.draw(st.lists(st.integers(0, 12), max_size=3))
        cached = [self.ours.get_cached_block(b"%032d" % name, [0]) for name in names]
        blocks = [found[0] for found in cached if found is not None]
        if self.policy != "lru":
            self.ours.renew(blocks)

    @rule(name=st.integers(0, 12))
    def look_up_without_extras(self, name: int) -> None:
        with self.ours.without_extras():
            found = self.ours.get_cached_block(b"%032d" % name, [0])
        assert found is None or not self.ours.is_extra(found[0])

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "ours"):
            return
        type(self).operations += 1
        assert audit.violations(self.ours) == []
        assert self.ours.get_num_free_blocks() == self.stock.get_num_free_blocks()
        assert self.ours.get_usage() == self.stock.get_usage()
        for stock, ours in self.held:
            if self.policy == "lru":
                assert [block.block_id for block in ours] == [block.block_id for block in stock]


@pytest.mark.parametrize("policy", POLICIES)
def test_machine(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    machine: Any = type(f"{policy}Machine", (PoolMachine,), {"policy": policy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert machine.operations > EXAMPLES
    if TIMES > 1:
        with capsys.disabled():
            print(f"\n{policy}: {machine.operations:,} operations, no violation")
