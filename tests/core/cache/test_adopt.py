"""Which policy an engine gets, and what it is told where it gets stock's queue."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from kvtune.core import state
from kvtune.core.cache.adopt import UNTRIED
from kvtune.core.settings import parse
from tests.core.pool_rig import Engine
from tests.core.steady_rig import Shape

pytestmark = pytest.mark.vllm

FULL, WINDOWS, STATES = Shape(), Shape(windows=(12,), blocks=110), Shape(states=1, blocks=110)


@pytest.mark.parametrize(
    ("shape", "settings", "policy"),
    [
        (FULL, {}, "density"),
        (FULL, {"reuse": False}, ""),
        (FULL, {"policy": "lru"}, ""),
        (FULL, {"policy": "tiered"}, ""),
        (FULL, {"reuse_bonus_s": 100.0}, "two_class"),
        (FULL, {"policy": "density", "reuse_bonus_s": 100.0}, "density"),
        (WINDOWS, {}, "density"),
        (WINDOWS, {"reuse": False}, "density"),
        (WINDOWS, {"policy": "tiered"}, "tiered"),
        (STATES, {}, ""),
        (STATES, {"policy": "density"}, "density"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_policy_of_each_kind_of_model(
    shape: Shape, settings: dict[str, object], policy: str, asynchronous: bool
) -> None:
    pool = Engine(replace(shape, asynchronous=asynchronous), parse(settings)).pool
    assert type(pool).__name__ == ("TieredPool" if policy else "BlockPool")
    assert state.state()["parts"]["pool"] is True
    assert state.state()["parts"]["reuse"] is (bool(policy) and settings.get("reuse", True))
    if policy:
        assert pool.free_block_queue.policy.name == policy
    untried = shape is STATES and not policy
    assert any(UNTRIED in note for note in state.state()["notes"]) is untried
