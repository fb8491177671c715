"""The client's side of a replay: what comes when, with and without transport delays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.lab.device.cost import NOMINAL, StepCost
from kvtune.lab.feed import Feed
from kvtune.lab.sim.transport import Transport
from kvtune.requests.loads.spec import build

DELAYED = StepCost(
    step_us=1e4, prefill_token_us=0, decode_us=0, kv_token_us=0, enter_us=2_000.0, leave_us=3_000.0
)
SPECS = (
    "decode:requests=20,prompt=8,output=1,concurrency=3",
    "rounds:prefixes=3,prefix=64,suffix=8,output=1,rounds=3,concurrency=2",
    "chat:sessions=3,turns=3,rate=2.0,think=0.5",
    "mix:prefixes=2,prefix=32,requests=12,cold=40,rate=30",
)


def test_requests_and_answers_are_delayed() -> None:
    transport = Transport(build("decode:requests=2,prompt=8,output=1,concurrency=1", seed=0), DELAYED)
    assert transport.arrivals(0.0) == [] and transport.next_time() == pytest.approx(0.002)
    assert transport.arrivals(0.002) == [(0, 0.0)] and transport.next_time() is None
    transport.finished(0, 0.010)
    assert transport.next_time() == pytest.approx(0.013) and not transport.done
    assert transport.arrivals(0.0149) == []
    # The engine looks when its step is over: the request was sent when the answer was there.
    assert transport.arrivals(0.020) == [(1, pytest.approx(0.013))]
    transport.finished(1, 0.030)
    assert not transport.done and transport.arrivals(0.033) == [] and transport.done


@given(st.sampled_from(SPECS), st.lists(st.floats(0.001, 0.4), min_size=40, max_size=40), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_without_delays_it_is_the_feed(spec: str, lengths: list[float], at_once: int) -> None:
    """An engine that ends up to `at_once` requests a step gets the same requests in the same order."""
    work = build(spec, seed=0)
    feed, transport = Feed(work), Transport(work, NOMINAL)
    now, running, step = 0.0, [], 0
    while not transport.done:
        sent = transport.arrivals(now)
        assert [index for index, _ in sent] == feed.ready(now)
        assert all(sent_s <= now for _, sent_s in sent)
        running += [index for index, _ in sent]
        if not running:
            due = transport.next_time()
            if due is None:
                assert transport.done or feed.done
                break
            now = max(now, due)
            continue
        now += lengths[step % len(lengths)]
        step += 1
        for index in running[:at_once]:
            feed.finished(index, now)
            transport.finished(index, now)
        running = running[at_once:]
        due, known = feed.next_time(), transport.next_time()
        assert known is not None and known <= (now if due is None else max(due, now))
    assert feed.done
