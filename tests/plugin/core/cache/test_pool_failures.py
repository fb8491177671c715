"""A policy that chooses or places nonsense: stock decides from then on. What raises: test_guards.py."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from bench import audit
from kvtune.plugin.core import state
from kvtune.plugin.core.settings import parse
from tests.plugin.core.pool_rig import SETTINGS, SHAPES, Engine, random_steps

pytestmark = pytest.mark.vllm


def handed_back(engine: Engine, why: str) -> bool:
    """Whether stock decides from here on, and one note says why."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    reported = state.state()
    (note,) = (note for note in reported["notes"] if "from here on" in note)
    windows = [
        group
        for group in engine.scheduler.kv_cache_manager.coordinator.single_type_managers
        if isinstance(group, SlidingWindowManager)
    ]
    assert windows and {type(group) for group in windows} == {SlidingWindowManager}
    assert not reported["parts"]["pool"] and not reported["parts"]["pinning"]
    assert type(engine.pool) is BlockPool and type(engine.pool.free_block_queue) is FreeKVCacheBlockQueue
    assert state.counters()["pool_failures"] == 1
    assert audit.check(engine.scheduler) == []
    return why in note


@pytest.mark.parametrize("answer", [(99, 1), (1, 0), (1, 10**6), None])
def test_a_policy_that_chooses_nonsense_hands_the_pool_back(answer: Any) -> None:
    engine = Engine(SHAPES["small_hybrid"], parse(SETTINGS["first"]))
    queues = engine.pool.free_block_queue
    queues.policy.choose = lambda wanted: answer
    random_steps(engine, 8, 120, lambda: None)
    engine.drain()
    assert handed_back(engine, "")


@pytest.mark.parametrize("queue", [0, 99])
def test_a_policy_that_places_nowhere_hands_the_pool_back(queue: Any) -> None:
    engine = Engine(SHAPES["small_hybrid"], parse(SETTINGS["first"]))
    queues = engine.pool.free_block_queue
    queues.policy.place = lambda block_id, grade: queue
    random_steps(engine, 8, 120, lambda: None)
    engine.drain()
    assert handed_back(engine, "")


def test_a_block_that_is_in_another_queue_than_its_byte_says_hands_the_pool_back() -> None:
    engine = Engine(SHAPES["small_hybrid"], parse(SETTINGS["first"]))
    random_steps(engine, 9, 60, lambda: None)
    queues = engine.pool.free_block_queue
    queues.queue_of[:] = bytes(len(queues.queue_of))
    random_steps(engine, 10, 140, lambda: None)
    engine.drain()
    assert handed_back(engine, "")
