"""The cache policy of a tier of host memory, behind vLLM's own manager."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

pytest.importorskip("vllm")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

    from kvtune.core.offload import install
    from kvtune.core.offload.policy import ReusePolicy
    from kvtune.core.offload.spec import ReuseManager

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
CHUNK = 16


def manager(capacity: int, threshold: int = 0) -> Any:
    return ReuseManager(capacity, install.POLICY_CLASS, install.POLICY_MODULE, store_threshold=threshold)


def key(number: int) -> Any:
    return make_offload_key(b"%032d" % number, 0)


class Engine:
    """Requests one after another, as vLLM's connector passes them to the manager; the pool holds nothing."""

    def __init__(self, capacity: int) -> None:
        self.manager = manager(capacity)
        self.policy: ReusePolicy = self.manager._policy
        self.requests = self.hits = self.stored = 0

    def ask(self, numbers: list[int]) -> int:
        """Chunks that the tier has of a prompt; the others are offered."""
        self.requests += 1
        context = ReqContext(f"{self.requests}")
        keys = [key(number) for number in numbers]
        for end, one in enumerate(keys, start=1):
            context.set_offload_key_position(one, end * CHUNK)
        self.manager.on_new_request(context)
        had = 0
        while had < len(keys) and self.manager.lookup(keys[had], context) is LookupResult.HIT:
            had += 1
        if had:
            self.manager.prepare_load(keys[:had], context)
            self.manager.complete_load(keys[:had], context)
        if keys[had:]:
            stores = self.manager.prepare_store(keys[had:], context)
            assert stores is not None
            self.stored += len(stores.keys_to_store)
            self.manager.complete_store(stores.keys_to_store, context)
        self.manager.on_request_finished(context)
        assert not self.policy.violations()
        self.hits += had
        return had


def prompt(number: int, chunks: int = 10) -> list[int]:
    return [number * 1000 + i for i in range(chunks)]


def test_while_there_is_room_everything_is_stored() -> None:
    engine = Engine(100)
    for number in range(10):
        engine.ask(prompt(number))
    assert engine.stored == 100
    assert [engine.ask(prompt(number)) for number in range(10)] == [10] * 10


def test_prompts_that_come_exactly_twice_hit_as_often_as_by_age() -> None:
    engine = Engine(100)
    for number in range(200):
        engine.ask(prompt(number))
        if number >= 4:
            assert engine.ask(prompt(number - 4)) == 10
    assert engine.policy.duel.by_age and engine.policy.refused == 0


def test_prompts_that_come_once_no_longer_push_out_those_that_come_back() -> None:
    hot, cold = 8, 40
    engine = Engine(100)
    number = 100
    late = 0
    for turn in range(60):
        for h in range(hot):
            had = engine.ask(prompt(h))
            late += had if turn >= 30 else 0
            for _ in range(cold // hot):
                number += 1
                engine.ask(prompt(number))
    assert late == 30 * hot * 10  # by age 480 chunks come between two visits, and none is left
    assert not engine.policy.duel.by_age
    assert engine.stored < 0.5 * engine.requests * 10


def test_a_conversation_that_goes_on_is_stored_as_a_whole() -> None:
    engine = Engine(100)
    engine.policy.duel.by_age = False
    engine.policy.duel.balance = 1000.0
    for number in range(1, 20):
        engine.ask(prompt(number))
    engine.ask(prompt(0, 6))  # refused, but remembered
    refused = engine.policy.refused
    assert engine.ask(prompt(0, 12)) == 0
    assert engine.policy.refused == refused
    assert engine.ask(prompt(0, 18)) == 12


def test_a_load_that_turns_against_reuse_is_served_by_age_again() -> None:
    engine = Engine(100)
    engine.policy.duel.by_age = False
    engine.policy.duel.balance = 2.0
    for number in range(400):
        engine.ask(prompt(number))
        if number >= 4:
            engine.ask(prompt(number - 4))
    assert engine.policy.duel.by_age
    hits = engine.hits
    for number in range(400, 420):
        engine.ask(prompt(number))
        engine.ask(prompt(number - 4))
    assert engine.hits == hits + 20 * 10


def test_a_reset_forgets_everything() -> None:
    engine = Engine(30)
    for number in range(10):
        engine.ask(prompt(number))
    engine.manager.reset_cache()
    assert not engine.policy.chunks and not engine.policy.violations()
    assert engine.ask(prompt(9)) == 0


class Calls(RuleBasedStateMachine):
    """Any order of offers, loads and their ends: the manager's own assertions hold, and nothing is violated."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 12
        self.manager = manager(self.capacity)
        self.policy: ReusePolicy = self.manager._policy
        self.open: dict[int, Any] = {}
        self.copies: list[tuple[bool, list[Any], Any]] = []
        self.number = 0

    @rule(first=st.integers(0, 8), chunks=st.integers(1, 6))
    def begin(self, first: int, chunks: int) -> None:
        self.number += 1
        context = ReqContext(f"{self.number}")
        keys = [key(number) for number in range(first, first + chunks)]
        for end, one in enumerate(keys, start=1):
            context.set_offload_key_position(one, end * CHUNK)
        self.manager.on_new_request(context)
        self.open[self.number] = (context, keys)

    @rule(data=st.data())
    def load(self, data: Any) -> None:
        if not self.open:
            return
        context, keys = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        there = []
        for one in keys:
            if self.manager.lookup(one, context) is not LookupResult.HIT:
                break
            there.append(one)
        if there:
            self.manager.prepare_load(there, context)
            self.copies.append((False, there, context))

    @rule(data=st.data())
    def store(self, data: Any) -> None:
        if not self.open:
            return
        context, keys = self.open[data.draw(st.sampled_from(sorted(self.open)))]
        offered = keys[data.draw(st.integers(0, len(keys) - 1)) :]
        stores = self.manager.prepare_store(offered, context)
        if stores is not None and stores.keys_to_store:
            assert set(stores.keys_to_store) <= set(offered)
            self.copies.append((True, stores.keys_to_store, context))

    @rule(data=st.data(), success=st.booleans())
    def copied(self, data: Any, success: bool) -> None:
        if not self.copies:
            return
        stored, keys, context = self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1)))
        if stored:
            self.manager.complete_store(keys, context, success)
        else:
            self.manager.complete_load(keys, context)

    @rule(data=st.data())
    def end(self, data: Any) -> None:
        if self.open:
            context, _ = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
            self.manager.on_request_finished(context)

    @rule()
    def turn(self) -> None:
        self.policy.duel.by_age = not self.policy.duel.by_age

    @invariant()
    def whole(self) -> None:
        assert not self.policy.violations()
        chunks = self.policy.chunks.values()
        idle = sum(chunk.ref_cnt == 0 for chunk in chunks)
        assert self.manager._num_evictable_cache_chunks == idle
        assert len(chunks) + self.manager._get_num_free_chunks() == self.capacity


def test_any_order_of_calls_keeps_the_tier_whole() -> None:
    run_state_machine_as_test(
        Calls, settings=settings(max_examples=60, stateful_step_count=50, deadline=None)
    )  # type: ignore[no-untyped-call]


def test_the_audit_looks_at_the_tier() -> None:
    from types import SimpleNamespace

    from kvtune.core.cache import audit

    engine = Engine(30)
    engine.ask(prompt(1))
    connector = SimpleNamespace(connector_scheduler=SimpleNamespace(manager=engine.manager))
    scheduler: Any = SimpleNamespace(connector=connector)
    assert audit.tier_violations(scheduler) == []
    engine.policy._once.popitem()
    assert audit.tier_violations(scheduler) == ["10 chunks of the tier are in 9 places by age"]
    assert audit.tier_violations(SimpleNamespace(connector=None)) == []  # type: ignore[arg-type]
