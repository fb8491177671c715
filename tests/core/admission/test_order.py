"""Admission by cached prefix, with vLLM's real schedulers: which waiting request goes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm")

from tests.core.admission.admission_rig import ONE, Overloaded, clocked, warm
from tests.core.pool_rig import BOTH, tokens
from tests.core.steady_rig import Shape, request

pytestmark = pytest.mark.vllm


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
