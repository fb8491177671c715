"""The first error of the pool or the windows stops no step: stock decides from then on, and a note says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtune.core import state
from kvtune.core.cache import audit
from kvtune.core.settings import parse
from tests.core.pool_rig import BOTH, SETTINGS, SHAPES, Engine, random_steps

pytestmark = pytest.mark.vllm


class Failing:
    """A policy whose every call raises."""

    def __getattr__(self, name: str) -> Any:
        def fails(*args: Any) -> Any:
            raise RuntimeError(f"{name} is broken")

        return fails


def handed_back(engine: Engine, why: str) -> bool:
    """Whether stock decides from here on, and one note says why."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    reported = state.state()
    (note,) = (note for note in reported["notes"] if "stock's from here on" in note)
    windows = [
        group
        for group in engine.scheduler.kv_cache_manager.coordinator.single_type_managers
        if isinstance(group, SlidingWindowManager)
    ]
    assert windows and {type(group) for group in windows} == {SlidingWindowManager}
    assert not reported["parts"]["pool"] and not reported["parts"]["pinning"]
    assert (
        engine.pool.free_block_queue.policy.name == "in_order"
        and engine.pool.counters()["pool_failures"] == 1
    )
    assert audit.check(engine.scheduler) == []
    return why in note


@BOTH
@pytest.mark.parametrize(
    "method",
    ["place", "choose", "hit", "left", "stored", "evicted", "reset"],
)
def test_a_policy_that_raises_hands_the_pool_back_and_serving_goes_on(
    method: str, asynchronous: bool
) -> None:
    # A policy is told only what it overrides.
    policy = "two_class" if method in ("hit", "stored", "evicted") else "chat"
    engine = Engine(replace(SHAPES["small_hybrid"], asynchronous=asynchronous), parse(SETTINGS[policy]))
    queues = engine.pool.free_block_queue
    steps = 0

    def each() -> None:
        nonlocal steps
        steps += 1
        if steps == 40:
            setattr(queues.policy, method, getattr(Failing(), method))
        assert audit.check(engine.scheduler) == []

    random_steps(engine, 7, 160, each)
    engine.pool.leave([])
    engine.scheduler.reset_prefix_cache()
    engine.drain()
    engine.scheduler.reset_prefix_cache()
    assert handed_back(engine, f"{method} is broken")
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1


@BOTH
@pytest.mark.parametrize("answer", [(99, 1), (1, 0), (1, 10**6), (-1, 1), None])
def test_a_policy_that_chooses_nonsense_hands_the_pool_back(answer: Any, asynchronous: bool) -> None:
    engine = Engine(replace(SHAPES["small_hybrid"], asynchronous=asynchronous), parse(SETTINGS["first"]))
    queues = engine.pool.free_block_queue
    queues.policy.choose = lambda wanted: answer
    random_steps(engine, 8, 120, lambda: None)
    engine.drain()
    assert handed_back(engine, "")


@BOTH
@pytest.mark.parametrize("queue", [-1, 0, 99, None])
def test_a_policy_that_places_nowhere_hands_the_pool_back(queue: Any, asynchronous: bool) -> None:
    engine = Engine(replace(SHAPES["small_hybrid"], asynchronous=asynchronous), parse(SETTINGS["first"]))
    queues = engine.pool.free_block_queue
    queues.policy.place = lambda block_id, grade: queue
    random_steps(engine, 8, 120, lambda: None)
    engine.drain()
    assert handed_back(engine, "")


@BOTH
@pytest.mark.parametrize("damage", ["queue_of", "links"])
def test_damaged_queues_are_filled_again_and_handed_back(damage: str, asynchronous: bool) -> None:
    engine = Engine(replace(SHAPES["small_hybrid"], asynchronous=asynchronous), parse(SETTINGS["first"]))
    queues = engine.pool.free_block_queue
    steps = 0

    def each() -> None:
        nonlocal steps
        steps += 1
        if steps == 60:
            if damage == "queue_of":
                queues.queue_of[:] = bytes(len(queues.queue_of))
            else:
                for block in queues.get_all_free_blocks():
                    block.next_free_block = block.prev_free_block = None

    random_steps(engine, 9, 200, each)
    engine.drain()
    assert handed_back(engine, "")


@BOTH
@pytest.mark.parametrize("method", ["_spans", "_take_over", "keep_output", "_as_in_stock"])
def test_window_bookkeeping_that_raises_leaves_stock_behind(
    method: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtune.core.cache.manager import KeepingManager
    from kvtune.core.cache.windows import KeepingWindowManager

    kind = KeepingManager if method == "_as_in_stock" else KeepingWindowManager
    engine = Engine(replace(SHAPES["small_hybrid"], asynchronous=asynchronous), parse(SETTINGS["first"]))
    monkeypatch.setattr(kind, method, getattr(Failing(), method))
    random_steps(engine, 11, 150, lambda: None)
    engine.drain()
    assert handed_back(engine, f"{method} is broken")
