"""The first error in the core's bookkeeping, in whichever part: all are stock's from then on, no token is lost."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    from bench import audit
    from kvtune.data.knobs import CoreSettings
    from kvtune.plugin.core import state
    from kvtune.plugin.core.breaker import SWITCHES, breaker_of
    from kvtune.plugin.core.cache import adopt
    from kvtune.plugin.core.cache.states import Stops
    from kvtune.plugin.core.cache.windows import KeepingWindowManager
    from kvtune.plugin.core.settings import parse
    from kvtune.plugin.core.steps import schedule, scheduler, update
    from kvtune.plugin.vllm.plugin_state import STATE
    from tests.plugin.core.pool_rig import SETTINGS, SHAPES, Engine, random_steps
    from tests.plugin.core.steady_rig import OUTLET, Outlet, Reader, build

pytestmark = pytest.mark.vllm


KEPT = {"keep_states": True, "output_states": True}


class Whole(Engine):
    """The pool, the windows, the steady path, and a client that reads columns: all that the breaker guards."""

    def __init__(self, asynchronous: bool, policy: str = "chat", states: int = 0) -> None:
        settings = parse({**SETTINGS[policy], **(KEPT if states else {})})
        shape = replace(
            SHAPES["small_hybrid"], asynchronous=asynchronous, blocks=160 + 40 * states, states=states
        )
        super().__init__(shape, settings)
        scheduler.adopt(self.scheduler, settings)
        self.breaker = breaker_of(self.scheduler.kv_cache_manager)
        self.outlet = Outlet(0, self.breaker)
        self.outlet.ask(0)
        setattr(self.scheduler, OUTLET, self.outlet)
        self.reader = Reader()
        self.wanted: dict[str, list[int]] = {}
        self.got: defaultdict[str, list[int]] = defaultdict(list)

    def add(self, prompt: list[int], output: int, priority: int = 0) -> str:
        name = super().add(prompt, output, priority)
        self.wanted[name] = [self.model.token(name, len(prompt) + i) for i in range(output)]
        return name

    def abort(self, name: str) -> None:
        super().abort(name)
        self.wanted.pop(name, None)

    def update(self, *step: Any) -> None:
        for client, one in self.scheduler.update_from_output(*step).items():
            packed = self.outlet.pack(client, one.outputs, self.scheduler.requests)
            for output in self.reader.read(packed):
                self.got[output.request_id] += output.new_token_ids


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("ours")


def in_the_policy(engine: Whole) -> None:
    engine.pool.free_block_queue.policy.place = fails


def in_the_queues(engine: Whole) -> None:
    for block in engine.pool.free_block_queue.get_all_free_blocks():
        block.next_free_block = block.prev_free_block = None


def in_columns(engine: Whole) -> None:
    engine.outlet._clients[0].columns = fails  # type: ignore[method-assign]


PLACES: dict[str, Callable[[Whole], None] | tuple[object, str]] = {
    "policy": in_the_policy,
    "queues": in_the_queues,
    "windows": (KeepingWindowManager, "_spans"),
    "states": (Stops, "places"),
    "schedule": (schedule, "next_event"),
    "update": (update, "one_each"),
    "columns": in_columns,
}


@pytest.mark.parametrize(
    ("place", "asynchronous"),
    [
        pytest.param(place, asynchronous, marks=() if asynchronous == number % 2 else pytest.mark.full)
        for number, place in enumerate(PLACES)
        for asynchronous in (False, True)
    ],
)
def test_the_first_error_hands_every_part_back(
    place: str, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Whole(asynchronous, states=2 if place == "states" else 0)
    steps = 0

    def each() -> None:
        nonlocal steps
        steps += 1
        if steps == 60:
            assert not engine.breaker.tripped and engine.reader.messages
            assert engine.scheduler.steady_steps or place == "states", "vLLM keeps its states inside a chunk"
            break_it = PLACES[place]
            if callable(break_it):
                break_it(engine)
            else:
                monkeypatch.setattr(*break_it, fails)
        if place != "queues" or steps < 60 or engine.breaker.tripped:
            assert audit.check(engine.scheduler) == []

    random_steps(engine, 7, 300, each)
    engine.drain()
    assert {name: engine.got[name] for name in engine.wanted} == engine.wanted
    reported = state.state()
    (note,) = (note for note in reported["notes"] if "from here on" in note)
    assert note.startswith("the core gave up: ") and ("ours" in note or place == "queues")
    assert not any(reported["parts"].get(name) for name in SWITCHES)
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert {type(one) for one in managers if isinstance(one, SlidingWindowManager)} == {SlidingWindowManager}
    assert type(engine.pool) is BlockPool and type(engine.pool.free_block_queue) is FreeKVCacheBlockQueue
    assert type(engine.scheduler.kv_cache_manager) is KVCacheManager
    assert type(engine.scheduler) in (Scheduler, AsyncScheduler)
    assert state.counters()["pool_failures"] == 1
    assert engine.scheduler.steady_off and not engine.outlet.reads_columns(0)
    assert audit.check(engine.scheduler) == []
    engine.outlet.ask(1)
    assert not engine.outlet.reads_columns(1), "a client that asks later gets stock's outputs"


@pytest.mark.parametrize("place", ["adopt_queues", "adopt_window"])
def test_a_pool_that_cannot_be_put_in_leaves_all_to_stock(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtune.plugin.core.cache.pool import PolicyPool

    monkeypatch.setattr(PolicyPool if place == "adopt_queues" else KeepingWindowManager, place, fails)
    adopt.install(CoreSettings())
    scheduler.install(CoreSettings())
    built = build(SHAPES["small_hybrid"])
    STATE.remove(scheduler.PART)
    STATE.remove(adopt.PART)
    assert breaker_of(built.kv_cache_manager).tripped and not hasattr(built, "steady_off")
    assert not any(state.state()["parts"].get(name) for name in SWITCHES)
    engine = Engine(SHAPES["small_hybrid"], None)
    engine.scheduler = built
    random_steps(engine, 3, 60, lambda: None)
    engine.drain()
    assert audit.check(built) == []
