"""Admission by cached prefix: where stock's order stays, what a failure in the bookkeeping does, and the switch."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtune.core.settings import parse
from tests.core.admission.admission_rig import ONE, Overloaded, clocked, warm
from tests.core.pool_rig import tokens
from tests.core.steady_rig import Shape, admission, build, state

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("where", ["find_longest_cache_hit", "prefix_cache_lookup_enabled"])
def test_a_look_up_that_fails_leaves_stocks_order_and_a_note(where: str) -> None:
    with clocked() as clock:
        engine = Overloaded(ONE, clock)
        warm(engine, tokens(1, 40))
        prefixes = engine.queue._prefixes
        owner = prefixes._coordinator if where.startswith("find") else prefixes._manager
        held = getattr(owner, where)
        ours = []

        def fails(*args: Any) -> Any:
            if not ours:
                ours.append(1)
                raise RuntimeError("broken on purpose")
            return held(*args)

        names = [engine.add(tokens(3, 30), 2), engine.add(tokens(1, 40) + tokens(4, 8), 2)]
        engine.step()
        setattr(owner, where, fails)
        engine.drain()
        assert engine.admitted == names and ours
        assert "broken on purpose" in engine.queue.off
        assert state.state()["parts"]["admission"] is False
        assert any("broken on purpose" in note for note in state.state()["notes"])


def test_a_failure_while_a_block_is_stored_does_not_reach_the_pool() -> None:
    with clocked() as clock:
        engine = Overloaded(ONE, clock)
        warm(engine, tokens(1, 40))
        names = [engine.add(tokens(2, 60), 2), engine.add(tokens(2, 60) + tokens(4, 8), 2)]
        engine.step()
        engine.scheduler.current_step += 1
        engine.queue.peek_request()
        engine.queue._prefixes._grown = None  # storing a block then raises
        engine.drain()
        assert engine.admitted == names and engine.queue.off


def test_an_order_of_its_own_or_nothing_to_look_up_in_stands_aside_by_name() -> None:
    settings = parse({"admission": "longest_prefix"})
    cases = {
        "priority": (Shape(policy="priority"), "priority scheduling"),
        "no cache": (Shape(caching=False), "prefix caching is off"),
    }
    for shape, why in cases.values():
        with clocked() as clock:
            engine = Overloaded(shape, clock, None)
            stock = type(engine.queue)
            admission.adopt(engine.scheduler, settings)
            assert type(engine.queue) is stock
            assert state.state()["parts"]["admission"] is False
            assert any(why in note for note in state.state()["notes"])


def test_a_group_without_full_attention_is_not_ranked_by() -> None:
    with clocked() as clock:
        engine = Overloaded(Shape(), clock, None)
        engine.scheduler.hash_block_size = 2  # hashes finer than blocks
        assert "no full-attention group" in admission.why_not(engine.scheduler)


def test_the_plugin_puts_it_in_only_where_asked_and_takes_it_out_again() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    stock = Scheduler.__init__
    admission.install(parse({}))
    assert Scheduler.__init__ is stock
    try:
        admission.install(parse({"admission": "longest_prefix", "admission_age_s": 7}))
        assert getattr(build(Shape()).waiting, "reorders", False)
    finally:
        admission.uninstall()
        state.clear()
    assert Scheduler.__init__ is stock
    assert not hasattr(build(Shape()).waiting, "reorders")


def test_building_it_wrong_leaves_stocks_queue_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(admission, "Prefixes", broken)
    try:
        admission.install(parse({"admission": "longest_prefix"}))
        assert not hasattr(build(Shape()).waiting, "reorders")
        assert any("broken on purpose" in note for note in state.state()["notes"])
    finally:
        admission.uninstall()
        state.clear()
