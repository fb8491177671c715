"""Admission by cached prefix under random loads: stock's order where nothing is shared, and the bound on waiting."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtune.core.cache import audit
from tests.core.admission.admission_rig import HYBRID, ONE, SEVERAL, Overloaded, clocked, warm
from tests.core.pool_rig import BOTH, random_steps, tokens
from tests.core.steady_rig import VOCAB, RequestStatus, Shape, inside, state

pytestmark = pytest.mark.vllm


@BOTH
@pytest.mark.parametrize("shape", ["full", "hybrid"])
def test_without_overload_every_step_is_stocks(shape: str, asynchronous: bool) -> None:
    """Room for everybody who comes: block ids, queues, order of requests, step by step."""
    made = Shape(seqs=64, blocks=4000, batched=4000, windows=(12,) if shape == "hybrid" else ())
    made = replace(made, asynchronous=asynchronous)
    logs: list[list[Any]] = [[], []]
    for log, age_s in zip(logs, (None, 1e4), strict=True):
        with clocked() as clock:
            engine = Overloaded(made, clock, age_s)
            random_steps(engine, 3, 200, lambda e=engine, steps=log: steps.append(inside(e.scheduler)))
    assert logs[0] == logs[1] and len(logs[0]) == 200


@BOTH
def test_with_nothing_shared_an_overloaded_engine_is_stocks_too(asynchronous: bool) -> None:
    """Preemptions, aborts, a small pool: all have equally much in the cache, namely nothing."""
    made = replace(SEVERAL, asynchronous=asynchronous)
    logs: list[list[Any]] = [[], []]
    for log, age_s in zip(logs, (None, 1e4), strict=True):
        with clocked() as clock:
            engine = Overloaded(made, clock, age_s)
            chance = random.Random(4)
            for number in range(300):
                if chance.random() < 0.4:
                    engine.add(tokens(10_000 + number, chance.randrange(5, 90)), chance.choice((1, 5, 30)))
                if chance.random() < 0.05 and engine.scheduler.requests:
                    engine.abort(chance.choice(list(engine.scheduler.requests)))
                engine.step()
                log.append(inside(engine.scheduler))
    assert logs[0] == logs[1]
    assert max(len(one["waiting"]) for one in logs[0]) > 15
    assert any(kept[4] for one in logs[0] for kept in one["requests"].values()), "nobody was preempted"


@BOTH
@pytest.mark.parametrize("age_s", [0.0, 15.0, 1e4])
@pytest.mark.parametrize("shape", [SEVERAL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
def test_everybody_is_answered_once_and_nobody_is_passed_after_the_bound(
    seed: int, shape: Shape, age_s: float, asynchronous: bool
) -> None:
    """Random overload with shared prefixes, preemptions, aborts, resets; the bound is checked by hand."""
    with clocked() as clock:
        engine = Overloaded(replace(shape, asynchronous=asynchronous), clock, age_s)
        aborted: set[str] = set()
        abort = engine.abort

        def note_abort(name: str) -> None:
            aborted.add(name)
            abort(name)

        engine.abort = note_abort  # type: ignore[method-assign]

        def each() -> None:
            assert audit.check(engine.scheduler) == []

        random_steps(engine, seed, 250, each)
        engine.drain()
        assert not state.state()["notes"] or "admission" not in str(state.state()["notes"])
        assert Counter(engine.admitted).most_common(1)[0][1] == 1
        everybody = {f"r-{n + 1}" for n in range(engine.count)}
        assert everybody - set(engine.admitted) <= aborted
        came = {name: int(name.split("-")[1]) for name in everybody}
        order, at_s = engine.admitted, engine.at_s
        waits_s = []
        for n, name in enumerate(order):
            # A request cannot be passed before it is there: whoever came later was admitted later than it came.
            passes = [i for i in range(n) if came[order[i]] > came[name]]
            if passes:
                first_s = at_s[order[passes[0]]]
                assert all(at_s[order[i]] - first_s < age_s or at_s[order[i]] == first_s for i in passes), (
                    name
                )
                waits_s.append(at_s[order[passes[-1] + 1]] - first_s)
        counted = engine.queue.counters()
        assert counted["admission_admitted"] == len(engine.admitted)
        # Who was aborted after somebody had passed it counts too, so there may be more.
        assert len(waits_s) <= counted["admission_overtaken"] <= len(waits_s) + len(aborted)
        longest_us = 1e6 * max(waits_s, default=0)
        assert counted["admission_longest_wait_us"] >= longest_us
        assert aborted or counted["admission_longest_wait_us"] == longest_us
        if age_s == 1e4:
            assert waits_s and counted["admission_by_age"] == 0 and counted["admission_ahead"] > 0


def test_the_bound_decides_and_is_counted() -> None:
    """A hot prefix that keeps coming holds a cold request off, but no longer than the bound."""
    with clocked() as clock:
        engine = Overloaded(ONE, clock, age_s=30.0)
        hot = tokens(1, 40)
        warm(engine, hot)
        cold = engine.add(tokens(3, 30), 2)
        for n in range(40):
            engine.add(hot + tokens(10 + n, 4), 2)
            engine.step()
        engine.until(lambda: cold in engine.admitted)
        place = engine.admitted.index(cold)
        assert place > 5
        first_s = engine.at_s[engine.admitted[0]]
        assert 30 <= engine.at_s[cold] - first_s <= 30 + 6
        engine.drain()
        counted = engine.queue.counters()
        assert counted["admission_by_age"] >= 1
        assert 30e6 <= counted["admission_longest_wait_us"] <= 1e6 * (engine.at_s[cold] - first_s)


def test_look_ups_change_nothing_and_every_request_is_counted_once() -> None:
    with clocked() as clock:
        engine = Overloaded(ONE, clock)
        warm(engine, tokens(1, 40), tokens(2, 80))
        for n in range(5):
            engine.add(tokens(1 + n % 2, 40) + tokens(10 + n, 8), 2)
        engine.step()
        engine.scheduler.current_step += 1
        manager, counted = engine.scheduler.kv_cache_manager, []
        record = manager.record_prefix_cache_stats
        manager.record_prefix_cache_stats = lambda one, hits: (counted.append(hits), record(one, hits))
        before = inside(engine.scheduler), [block.ref_cnt for block in engine.pool.blocks]
        for _ in range(20):
            engine.queue.peek_request()
        assert (inside(engine.scheduler), [block.ref_cnt for block in engine.pool.blocks]) == before
        assert not counted
        engine.drain()
        assert counted == [40] * 5


def test_many_equal_requests_are_looked_up_within_the_budget() -> None:
    """All wait for one prefix that is stored now: a look walks LOOKS blocks at most, and the first is found at once."""
    from kvtune.core.admission import prefixes

    with clocked() as clock:
        engine = Overloaded(replace(ONE, blocks=2000, max_len=4000, batched=4000), clock)
        warm(engine, tokens(1, 2000))
        names = [engine.add(tokens(1, 2000) + [n % VOCAB, n // VOCAB] * 2, 1) for n in range(300)]
        engine.scheduler.current_step += 2
        queue, looks = engine.queue, Counter[str]()
        queue._prefixes._listen()

        class Counting(dict[Any, Any]):
            def __contains__(self, key: object) -> bool:
                looks["looks"] += 1
                return super().__contains__(key)

        queue._prefixes._cached = Counting(queue._prefixes._cached)
        assert queue.peek_request().request_id == names[0]
        assert 0 < looks["looks"] <= prefixes.LOOKS + prefixes.TRIES
        assert queue._prefixes.lead().request.request_id == names[0]


def test_a_finished_requests_place_is_forgotten() -> None:
    with clocked() as clock:
        engine = Overloaded(SEVERAL, clock)
        random_steps(engine, 11, 200, lambda: None)
        for name in list(engine.scheduler.requests):
            engine.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        queue = engine.queue
        assert not queue and not queue._prefixes and not queue._prefixes._filed
        assert not queue._prefixes._doubtful and not queue._behind
