"""Admission by cached prefix, with vLLM's real schedulers: who goes first, how long others wait, who stands aside."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtune.core.cache import audit
from kvtune.core.settings import parse
from tests.core.admission.admission_rig import Overloaded, clocked
from tests.core.pool_rig import BOTH, random_steps, tokens
from tests.core.steady_rig import VOCAB, RequestStatus, Shape, admission, build, inside, request, state

pytestmark = pytest.mark.vllm

ONE = Shape(seqs=1, blocks=200, batched=64)
"""One request runs, all others wait."""
SEVERAL = Shape(seqs=4, blocks=90, batched=48)
HYBRID = Shape(seqs=4, windows=(12,), blocks=160, batched=48)


def warm(engine: Overloaded, *prompts: list[int]) -> None:
    """Have the prompts' blocks cached, then something running, so that whoever comes now waits."""
    for prompt in prompts:
        engine.serve(prompt, 1)
    engine.add(tokens(999, 20), 6)
    engine.step()
    engine.admitted.clear()


@BOTH
def test_of_those_that_wait_the_one_with_most_in_the_cache_goes_first(asynchronous: bool) -> None:
    with clocked() as clock:
        engine = Overloaded(replace(ONE, asynchronous=asynchronous), clock)
        warm(engine, tokens(1, 40), tokens(2, 80))
        cold = engine.add(tokens(3, 30), 2)
        some = engine.add(tokens(1, 40) + tokens(4, 8), 2)
        most = engine.add(tokens(2, 80) + tokens(5, 8), 2)
        engine.step()
        engine.drain()
        assert engine.admitted == [most, some, cold]
        assert engine.hits[most] == 80 and engine.hits[some] == 40


def test_equally_much_in_the_cache_is_first_come_first_served() -> None:
    with clocked() as clock:
        engine = Overloaded(ONE, clock)
        warm(engine, tokens(1, 40))
        names = [engine.add(tokens(1, 40) + tokens(10 + i, 8), 2) for i in range(6)]
        engine.drain()
        assert engine.admitted == names


def test_what_is_stored_while_a_request_waits_counts() -> None:
    """Nobody had it when the requests came; the first of them computes it, and the others of its kind follow."""
    with clocked() as clock:
        engine = Overloaded(ONE, clock)
        warm(engine)
        first = engine.add(tokens(1, 60) + tokens(2, 4), 2)
        other = engine.add(tokens(3, 30), 2)
        same = engine.add(tokens(1, 60) + tokens(4, 4), 2)
        engine.drain()
        assert engine.admitted == [first, same, other]
        assert engine.hits[same] == 60


def test_what_was_evicted_meanwhile_does_not_count() -> None:
    with clocked() as clock:
        engine = Overloaded(ONE, clock)
        warm(engine, tokens(1, 40), tokens(2, 80))
        gone = engine.add(tokens(2, 80) + tokens(5, 8), 2)
        some = engine.add(tokens(1, 40) + tokens(4, 8), 2)
        engine.scheduler.current_step += 1
        assert engine.queue.peek_request().request_id == gone
        hashes = engine.queue._first().request.block_hashes
        cached = engine.pool.get_cached_block(hashes[1], [0])
        engine.pool.evict_blocks({cached[0].block_id})
        engine.drain()
        assert engine.admitted[0] == some


def test_a_reset_of_the_cache_is_noticed() -> None:
    with clocked() as clock:
        engine = Overloaded(ONE, clock)
        warm(engine, tokens(1, 40))
        cold = engine.add(tokens(3, 30), 2)
        warmer = engine.add(tokens(1, 40) + tokens(4, 8), 2)
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.step()
        engine.drain()
        assert engine.admitted == [cold, warmer]
        # And what is stored from then on counts again.
        warm(engine, tokens(7, 40))
        cold = engine.add(tokens(8, 30), 2)
        warmer = engine.add(tokens(7, 40) + tokens(4, 8), 2)
        engine.step()
        engine.drain()
        assert engine.admitted == [warmer, cold]


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
            random_steps(engine, 3, 200, lambda e=engine, found=log: found.append(inside(e.scheduler)))
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


def test_a_preempted_request_comes_back_before_all_others() -> None:
    with clocked() as clock:
        engine = Overloaded(Shape(seqs=2, blocks=24, batched=64), clock)
        engine.serve(tokens(1, 24), 1)
        engine.add(tokens(2, 24), 60)
        late = engine.add(tokens(3, 24), 60)
        engine.step()
        hot = engine.add(tokens(1, 24) + tokens(4, 4), 2)
        engine.until(lambda: bool(engine.scheduler.requests[late].num_preemptions))
        assert [one.request_id for one in engine.queue] == [late, hot]
        assert engine.queue.peek_request().request_id == late


def test_structured_and_streaming_requests_pass_nobody_and_nobody_passes_them() -> None:
    with clocked() as clock:
        engine = Overloaded(ONE, clock)
        warm(engine, tokens(1, 40), tokens(2, 80))
        cold = engine.add(tokens(3, 30), 2)
        before = engine.add(tokens(1, 40) + tokens(6, 4), 2)
        fence = request(name="r-500", prompt=tokens(2, 80) + tokens(5, 8), output=2)
        fence.resumable = True
        engine.scheduler.add_request(fence)
        after = engine.add(tokens(2, 80) + tokens(7, 8), 2)
        last = engine.add(tokens(8, 20), 2)
        engine.scheduler.current_step += 2
        order = []
        while engine.queue:
            order.append(engine.queue.peek_request().request_id)
            assert engine.queue.pop_request().request_id == order[-1]
        assert order == [before, cold, "r-500", after, last]


def test_who_is_skipped_keeps_stocks_place_in_front() -> None:
    """As with a grammar that is not compiled yet, or an adapter that has no room."""
    with clocked() as clock:
        engine = Overloaded(ONE, clock)
        warm(engine, tokens(1, 40))
        cold = engine.add(tokens(3, 30), 2)
        hot = engine.add(tokens(1, 40) + tokens(4, 8), 2)
        engine.step()
        engine.scheduler.current_step += 1
        queue = engine.queue
        skipped = [queue.pop_request() for _ in range(2) if queue.peek_request()]
        assert [one.request_id for one in skipped] == [hot, cold]
        queue.prepend_requests(reversed(skipped))
        assert [one.request_id for one in queue] == [hot, cold]
        assert queue.peek_request().request_id == hot
        assert queue.counters()["admission_ahead"] == 0, "a skipped request is not an admitted one"


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
        engine.queue._prefixes._grown = None  # what is stored cannot be told to anybody
        engine.drain()
        assert engine.admitted == names and engine.queue.off


def test_an_order_of_its_own_or_nothing_to_look_up_in_stands_aside_by_name() -> None:
    asked = parse({"admission": "longest_prefix"})
    cases = {
        "priority": (Shape(policy="priority"), "priority scheduling"),
        "no cache": (Shape(caching=False), "prefix caching is off"),
    }
    for shape, why in cases.values():
        with clocked() as clock:
            engine = Overloaded(shape, clock, None)
            stock = type(engine.queue)
            admission.adopt(engine.scheduler, asked)
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


def test_ten_thousand_equal_requests_are_looked_up_within_the_budget() -> None:
    """All wait for one prefix that is stored now: a look walks LOOKS blocks at most, and the first is found at once."""
    from kvtune.core.admission import prefixes

    with clocked() as clock:
        engine = Overloaded(replace(ONE, blocks=2000, max_len=4000, batched=4000), clock)
        warm(engine, tokens(1, 2000))
        names = [engine.add(tokens(1, 2000) + [n % VOCAB, n // VOCAB] * 2, 1) for n in range(300)]
        engine.scheduler.current_step += 2
        queue, asked = engine.queue, Counter[str]()
        queue._prefixes._listen()
        held = queue._prefixes._map._cache

        class Counting(dict[Any, Any]):
            def __contains__(self, key: object) -> bool:
                asked["looks"] += 1
                return super().__contains__(key)

        queue._prefixes._map._cache = Counting(held)
        assert queue.peek_request().request_id == names[0]
        assert asked["looks"] <= prefixes.LOOKS + prefixes.TRIES
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


def test_a_hit_that_a_window_brings_is_seen_though_full_attention_had_it_all_along() -> None:
    """The prefix is in the cache, its window is not: a second visitor computes it anew, a third one hits."""
    with clocked() as clock:
        shape = Shape(seqs=1, windows=(12,), blocks=400, batched=16, max_len=400)
        engine = Overloaded(shape, clock, pinning=False, policy="lru")
        prefix = tokens(1, 80)
        warm(engine, prefix + tokens(2, 24))
        second = engine.add(prefix + tokens(3, 24), 2)
        cold = engine.add(tokens(4, 40), 2)
        third = engine.add(prefix + tokens(5, 24), 2)
        prefixes = engine.queue._prefixes
        prefixes.best()
        while len(engine.admitted) < 3:
            engine.step()
            prefixes.best()  # also between the chunks of the second one, when the window is not there yet
        engine.drain()
        assert engine.admitted == [second, third, cold]
        assert engine.hits[second] == 0 and engine.hits[third] == 80


def test_what_one_request_has_in_the_cache_is_not_taken_for_anothers() -> None:
    with clocked() as clock:
        engine = Overloaded(ONE, clock)
        warm(engine, tokens(1, 80))
        engine.add(tokens(1, 80) + tokens(5, 8), 2)
        engine.add(tokens(3, 120), 2)
        engine.add(tokens(1, 40) + tokens(6, 60), 2)
        engine.queue._prefixes.lead()
        assert [place.length for place in engine.queue._prefixes._places.values()] == [20, 0, 10]
