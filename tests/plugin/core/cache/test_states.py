"""Kept states in one scheduler: a shared prefix hits at its second visit; what the core does not know stays stock's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtune.plugin.core import state
from kvtune.plugin.core.settings import parse
from tests.plugin.core.pool_rig import BOTH, Engine, tokens
from tests.plugin.core.steady_rig import Shape

pytestmark = pytest.mark.vllm
KEEPS = {"keep_states": True, "slack": 8, "min_drop": 1}
SHAPE = Shape(states=2, max_len=160)


def visits(shape: Shape, core: dict[str, Any] | None, suffix: int = 10) -> list[int]:
    """The hits of three visits of five prefixes of 60 tokens, each followed by new ones."""
    state.use(state.Books())
    engine = Engine(shape, None if core is None else parse(core))
    return [
        sum(engine.serve(tokens(100 + i, 60) + tokens(1000 * visit + i, suffix), 6) for i in range(5))
        for visit in range(3)
    ]


@BOTH
def test_the_second_visit_hits_what_stock_hits_at_the_third(asynchronous: bool) -> None:
    shape = Shape(states=2, max_len=160, asynchronous=asynchronous)
    assert visits(shape, None) == [0, 0, 300]
    assert visits(shape, KEEPS) == [0, 300, 300]
    assert state.state()["parts"]["keep_states"] and state.counters()["state_stops"] > 0


def test_a_longer_suffix_than_the_slack_hits_at_a_doubling_distance() -> None:
    core = {**KEEPS, "slack": 12}  # states at tokens 84, 72 and 48 of 100
    assert visits(SHAPE, core, suffix=40) == [0, 5 * 48, 300]
    assert visits(SHAPE, {**core, "windows": 0}, suffix=40) == [0, 0, 300]


def test_a_next_turn_goes_on_behind_the_answer_if_that_is_asked_for() -> None:
    def turns(**more: bool) -> list[int]:
        engine = Engine(SHAPE, parse({**KEEPS, **more}))
        engine.serve(tokens(1, 40), 30)
        request = tokens(1, 40)
        answer = [engine.model.token("r-1", 40 + i) for i in range(30)]
        return [engine.serve(request + answer + tokens(2, 5), 4)]

    assert turns()[0] <= 40 < turns(output_states=True)[0]


@pytest.mark.parametrize(
    ("shape", "core", "why"),
    [
        (Shape(states=1, retention=8), KEEPS, "at an interval"),
        (Shape(states=0), KEEPS, "no recurrent states"),
        (SHAPE, {**KEEPS, "policy": "pin"}, "windows only"),
        (SHAPE, {**KEEPS, "pool": False}, "switched off"),
    ],
)
def test_what_the_core_does_not_know_stays_stocks_and_is_named(
    shape: Shape, core: dict[str, Any], why: str
) -> None:
    state.use(state.Books())
    engine = Engine(shape, parse(core))
    assert state.state()["parts"]["keep_states"] is False
    assert any(note.startswith("keep_states: ") and why in note for note in state.state()["notes"])
    assert "_mamba_block_aligned_split" not in engine.scheduler.__dict__


def test_a_connector_leaves_the_states_to_stock() -> None:
    from kvtune.plugin.core.cache import states

    state.use(state.Books())
    engine = Engine(SHAPE, parse(KEEPS))
    engine.scheduler.__dict__.pop("_mamba_block_aligned_split")
    engine.scheduler.connector = object()
    states.adopt(engine.scheduler)
    assert state.state()["parts"]["keep_states"] is False
    assert any("KV connector" in note for note in state.state()["notes"])
