from __future__ import annotations

import heapq
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.lab.feed import Feed
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Request, Span, Workload


def test_requests_that_a_run_did_not_send_do_not_exist() -> None:
    feed = Feed(build("rounds:prefixes=2,rounds=3,concurrency=1"), only=[0, 1, 2])
    sent = []
    while not feed.done:
        (index,) = feed.ready(0.0)
        feed.finished(index, 0.0)
        sent.append(index)
    assert sent == [0, 1, 2] and feed.next_time() is None
    chat = Feed(make([request(0), request(1, after=(0,)), request(2, after=(1,))]), only=[0, 1])
    for index in (0, 1):
        assert chat.ready(0.0) == [index]
        chat.finished(index, 0.0)
    assert chat.done


def make(requests: list[Request], concurrency: int | None = None, barrier: bool = False) -> Workload:
    return Workload("made", "made", {}, 0, requests, "", concurrency, barrier)


def request(i: int, **fields: object) -> Request:
    return Request(str(i), (Span(i, 0, 4),), 1, **fields)  # type: ignore[arg-type]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    count = draw(st.integers(0, 25))
    barrier = draw(st.booleans())
    requests: list[Request] = []
    for i in range(count):
        after = tuple(sorted(draw(st.sets(st.integers(0, i - 1), max_size=3)))) if i else ()
        round = draw(st.integers(-1, 3))
        if barrier:
            round = max([round, *(requests[one].round for one in after)])
        requests.append(
            request(
                i,
                arrival_s=draw(st.none() | st.sampled_from([0.0, 0.5, 1.0, 2.5, 7.0])),
                after=after,
                think_s=draw(st.sampled_from([0.0, 0.0, 1.5])),
                round=round,
            )
        )
    return make(requests, draw(st.none() | st.integers(1, 4)), barrier)


def drive(work: Workload, seed: int) -> tuple[dict[int, float], dict[int, float]]:
    """Send everything with random service times on a virtual clock. Returns when requests were sent and finished."""
    rng = random.Random(seed)
    feed = Feed(work)
    sent: dict[int, float] = {}
    finished: dict[int, float] = {}
    flying: list[tuple[float, int]] = []
    now = 0.0
    while not feed.done:
        for index in feed.ready(now):
            assert index not in sent
            sent[index] = now
            heapq.heappush(flying, (now + rng.choice([0.1, 0.7, 3.0]), index))
        assert feed._state.count(1) == len(flying)
        assert not feed.ready(now)
        by_time = feed.next_time()
        assert by_time is None or by_time > now
        by_finish = flying[0][0] if flying else None
        times = [t for t in (by_time, by_finish) if t is not None]
        assert times, "nothing in flight and nothing to wait for, but not done"
        now = min(times)
        while flying and flying[0][0] <= now:
            index = heapq.heappop(flying)[1]
            finished[index] = now
            feed.finished(index, now)
    assert feed.next_time() is None
    return sent, finished


@pytest.mark.full
@settings(max_examples=150)
@given(workloads(), st.integers(0, 1000))
def test_every_request_is_sent_once_and_never_too_early(work: Workload, seed: int) -> None:
    sent, finished = drive(work, seed)
    assert sorted(sent) == list(range(len(work.requests)))
    for i, r in enumerate(work.requests):
        assert sent[i] >= (r.arrival_s or 0.0)
        for one in r.after:
            assert sent[i] >= finished[one] + r.think_s
        if work.barrier:
            earlier = [finished[k] for k, other in enumerate(work.requests) if other.round < r.round]
            assert sent[i] >= max(earlier, default=0.0)
    if work.concurrency is not None:
        for i in sent:
            flying = [k for k in sent if sent[k] <= sent[i] < finished[k]]
            assert len(flying) <= work.concurrency


@settings(max_examples=60)
@given(workloads(), st.integers(0, 1000))
def test_a_request_is_sent_as_soon_as_it_may_be(work: Workload, seed: int) -> None:
    """Below the concurrency limit, a request is sent the moment its last condition is met."""
    work = make(list(work.requests), None, work.barrier)
    sent, finished = drive(work, seed)
    for i, r in enumerate(work.requests):
        due = r.arrival_s or 0.0
        if r.after:
            due = max(due, max(finished[one] for one in r.after) + r.think_s)
        if work.barrier:
            due = max([due, *(finished[k] for k, o in enumerate(work.requests) if o.round < r.round)])
        assert sent[i] == due


def test_a_closed_loop_keeps_order_and_concurrency() -> None:
    feed = Feed(make([request(i) for i in range(5)], concurrency=2))
    assert feed.ready(0.0) == [0, 1]
    assert feed.next_time() is None
    feed.finished(1, 3.0)
    assert feed.ready(3.0) == [2]


def test_a_finish_that_is_not_in_flight_is_a_bug_of_the_caller() -> None:
    feed = Feed(make([request(0)]))
    with pytest.raises(ValueError, match="not in flight"):
        feed.finished(0, 0.0)
    feed.ready(0.0)
    feed.finished(0, 0.0)
    with pytest.raises(ValueError, match="not in flight"):
        feed.finished(0, 0.0)


def test_requests_that_could_never_be_sent_are_refused() -> None:
    with pytest.raises(ValueError, match="does not come before"):
        Feed(make([request(0, after=(0,))]))
    with pytest.raises(ValueError, match="later round"):
        Feed(make([request(0, round=1), request(1, round=0, after=(0,))], barrier=True))
    with pytest.raises(ValueError, match="concurrency"):
        Feed(make([request(0)], concurrency=0))
