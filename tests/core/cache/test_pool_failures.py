"""Each hook of a policy and each step of the windows may fail: stock decides from then on. See test_breaker.py."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtune.core import state
from kvtune.core.cache import audit
from kvtune.core.settings import parse
from tests.core.pool_rig import SETTINGS, SHAPES, Engine, random_steps

pytestmark = pytest.mark.vllm


class Failing:
    """A policy whose every call raises."""

    def __getattr__(self, name: str) -> Any:
        def fails(*args: Any) -> Any:
            raise RuntimeError(f"{name} is broken")

        return fails


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


@pytest.mark.parametrize(
    "method",
    ["place", "choose", "hit", "left", "stored", "evicted", "reset"],
)
def test_a_policy_that_raises_hands_the_pool_back_and_serving_goes_on(method: str) -> None:
    # A policy is told only what it overrides.
    policy = "two_class" if method in ("hit", "stored", "evicted") else "chat"
    engine = Engine(SHAPES["small_hybrid"], parse(SETTINGS[policy]))
    queues = engine.pool.free_block_queue
    steps = 0

    def each() -> None:
        nonlocal steps
        steps += 1
        if steps == 40:
            setattr(queues.policy, method, getattr(Failing(), method))
        assert audit.check(engine.scheduler) == []

    random_steps(engine, 7, 160, each)
    engine.scheduler.reset_prefix_cache()
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    assert handed_back(engine, f"{method} is broken")
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1


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


@pytest.mark.parametrize("method", ["_take_over", "keep_output", "_as_in_stock"])
def test_window_bookkeeping_that_raises_leaves_stock_behind(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtune.core.cache.manager import KeepingManager
    from kvtune.core.cache.windows import KeepingWindowManager

    kind = KeepingManager if method == "_as_in_stock" else KeepingWindowManager
    engine = Engine(SHAPES["small_hybrid"], parse(SETTINGS["first"]))
    monkeypatch.setattr(kind, method, getattr(Failing(), method))
    random_steps(engine, 11, 150, lambda: None)
    engine.drain()
    assert handed_back(engine, f"{method} is broken")
