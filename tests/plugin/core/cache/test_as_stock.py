"""The default's promise: sent one request at a time, no load loses more than one request's hit against stock.

In sum, not request by request, and with one known exception: a prompt that hits more is computed in fewer chunks, so
its own blocks become free in another order, and what survives longer lets stock's own rule for shared prefixes keep
other windows. Where the pool ends just among these, one later request can miss what it hits with stock (`KNOWN`).
5,000 loads: KVTUNE_EXAMPLES=50 pytest tests/plugin/core/cache/test_as_stock.py --hypothesis-seed=1 --timeout 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")

from kvtune.plugin.core.settings import parse
from tests.choice import TIMES, drawn
from tests.plugin.core.pool_rig import Engine, tokens
from tests.plugin.core.steady_rig import Shape

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
LONGEST = 160

SHAPES = st.builds(
    Shape,
    windows=st.sampled_from([(12,), (20,), (12, 12), (8, 24)]),
    block=st.sampled_from([4, 8]),
    blocks=st.integers(0, 60),
    batched=st.sampled_from([16, 32, 64]),
    max_len=st.just(LONGEST),
)
KEPT = st.fixed_dictionaries({"keep_states": st.just(True), "output_states": st.booleans()})
WITH_STATES = st.builds(
    Shape,
    windows=st.sampled_from([(), (), (12,)]),
    states=st.integers(1, 3),
    block=st.sampled_from([4, 8]),
    blocks=st.integers(0, 60),
    batched=st.sampled_from([16, 32, 64, 200]),
    max_len=st.just(LONGEST),
)
SETTINGS = st.fixed_dictionaries(
    {
        "slack": st.sampled_from([0, 8, 24, 64]),
        "windows": st.integers(0, 4),
        "min_drop": st.sampled_from([0, 2, 16]),
    }
)
LENGTH, OUTPUT = st.integers(1, 40), st.integers(1, 30)
REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.just("prefix"), st.integers(0, 3), st.sampled_from([48, 90]), LENGTH, OUTPUT),
        st.tuples(st.just("cold"), st.just(0), st.just(0), st.integers(1, 120), OUTPUT),
        st.tuples(st.just("again"), st.integers(1, 12), st.just(0), st.just(0), OUTPUT),
        st.tuples(st.just("turn"), st.integers(1, 12), st.just(0), LENGTH, OUTPUT),
    ),
    min_size=10,
    max_size=40,
)


def served(shape: Shape, core: dict[str, Any] | None, requests: list[Any], together: int) -> list[int]:
    """Tokens that each request hits. `together`: how many requests are served at a time.

    `turn` goes on behind an answer, `again` sends an earlier prompt once more: of those that have ended.
    """
    engine = Engine(shape, None if core is None else parse(core))
    ended: list[Any] = []
    names = []
    for first in range(0, len(requests), together):
        running = []
        for number, (kind, which, shared, length, output) in enumerate(
            requests[first : first + together], first
        ):
            prompt, fresh = [], tokens(1000 + number, length)
            if kind == "prefix":
                prompt = tokens(which, shared) + fresh
            elif kind == "cold" or which > len(ended):
                prompt = fresh or tokens(1000 + number, 1)
            else:
                earlier = ended[-which]
                answer = list(earlier.output_token_ids) if kind == "turn" else []
                prompt = list(earlier.prompt_token_ids) + answer + fresh
            names.append(engine.add(prompt[: LONGEST - output - 1], output))
            running.append(engine.scheduler.requests[names[-1]])
        engine.drain()
        ended += running
    return [engine.hits[name] for name in names]


def both(
    shape: Shape, core: dict[str, Any], requests: list[Any], together: int = 1
) -> tuple[list[int], list[int]]:
    """What the core and stock hit. `shape.blocks`: beyond those that the longest requests need."""
    least = (1 + len(shape.windows)) * (LONGEST // shape.block) + 3 * shape.states + 2
    shape = replace(shape, blocks=together * least + shape.blocks)
    return served(shape, core, requests, together), served(shape, None, requests, together)


@pytest.mark.full
@settings(
    max_examples=drawn(100),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    derandomize=TIMES == 1,
)
@given(SHAPES, SETTINGS, REQUESTS)
def test_no_load_loses_more_than_one_requests_hit(
    shape: Shape, core: dict[str, Any], requests: list[Any]
) -> None:
    ours, stock = both(shape, core, requests)
    assert sum(ours) >= sum(stock) - max(stock), (ours, stock)


@pytest.mark.full
@settings(
    max_examples=drawn(100),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    derandomize=TIMES == 1,
)
@given(WITH_STATES, SETTINGS, KEPT, REQUESTS)
def test_no_load_on_a_model_with_states_loses_more_than_one_requests_hit(
    shape: Shape, core: dict[str, Any], kept: dict[str, bool], requests: list[Any]
) -> None:
    ours, stock = both(shape, {**core, **kept}, requests)
    assert sum(ours) >= sum(stock) - max(stock), (ours, stock)


KNOWN = [
    ("prefix", 3, 90, 22, 1),
    ("turn", 6, 0, 16, 23),
    ("prefix", 1, 48, 1, 1),
    ("again", 1, 0, 0, 1),
    ("prefix", 3, 90, 26, 21),
    ("cold", 0, 0, 64, 1),
    ("turn", 5, 0, 18, 24),
    ("prefix", 1, 48, 19, 22),
    ("turn", 5, 0, 20, 22),
    ("again", 5, 0, 0, 1),
]


def test_the_known_exception_costs_one_later_request() -> None:
    """The fifth request hits 88 tokens in an extra, stock none; it is sent again when the pool ends there."""
    shape = Shape(windows=(12, 12), block=8, blocks=29, batched=32, max_len=LONGEST)
    ours, stock = both(shape, {"slack": 24, "windows": 0, "min_drop": 0}, KNOWN)
    assert ours == [0, 0, 0, 48, 88, 0, 8, 48, 48, 0]
    assert stock == [0, 0, 0, 48, 0, 0, 8, 48, 48, 112]


EARLY = {
    "third": (16, 1, [("prefix", 0, 90, 1, 1), ("cold", 0, 0, 1, 1), ("prefix", 0, 90, 1, 1)], [0, 0, 88]),
    "drawn": (200, 2, [("prefix", 2, 48, 4, 4), ("prefix", 2, 90, 9, 5)], [0, 48]),
}


@pytest.mark.parametrize(("batched", "states", "requests", "hits"), EARLY.values(), ids=EARLY)
def test_a_request_waits_in_the_room_that_a_chunk_leaves_which_ends_at_a_state(
    batched: int, states: int, requests: list[Any], hits: list[int]
) -> None:
    """The last request has a prefix that the first is computing: it would begin before, and hit nothing."""
    shape = Shape(windows=(12,), states=states, block=4, blocks=0, batched=batched, max_len=LONGEST)
    core = {"slack": 0, "windows": 3, "min_drop": 0, "keep_states": True}
    assert both(shape, core, requests, together=len(requests)) == (hits, hits)
    assert both(shape, {**core, "windows": 0}, requests, together=len(requests)) == (hits, hits)
    assert both(shape, core, requests) == (hits, hits)


@pytest.mark.full
@settings(
    max_examples=drawn(100),
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
    derandomize=TIMES == 1,
)
@given(WITH_STATES, SETTINGS, KEPT, REQUESTS, st.integers(2, 8))
def test_where_nothing_is_evicted_no_load_with_several_at_a_time_hits_less_than_with_stock(
    shape: Shape, core: dict[str, Any], kept: dict[str, bool], requests: list[Any], together: int
) -> None:
    shape = replace(shape, blocks=2500)
    ours, stock = both(shape, {**core, **kept}, requests, together)
    assert sum(ours) >= sum(stock), (ours, stock)
