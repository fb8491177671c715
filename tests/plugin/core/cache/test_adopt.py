"""Which policy an engine gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from kvtune.plugin.core import state
from kvtune.plugin.core.settings import parse
from tests.plugin.core.pool_rig import Engine
from tests.plugin.core.steady_rig import Shape

pytestmark = pytest.mark.vllm

FULL, WINDOWS, STATES = Shape(), Shape(windows=(12,), blocks=110), Shape(states=1, blocks=110)


@pytest.mark.parametrize(
    ("shape", "settings", "policy"),
    [
        (FULL, {}, ""),
        (FULL, {"policy": "first"}, ""),
        (FULL, {"policy": "chat"}, ""),
        (FULL, {"policy": "two_class"}, ""),
        (FULL, {"reuse_bonus_s": 100.0}, "two_class"),
        (FULL, {"policy": "lru", "reuse_bonus_s": 100.0}, ""),
        (WINDOWS, {}, "first"),
        (WINDOWS, {"reuse_bonus_s": 100.0}, "two_class"),
        (WINDOWS, {"policy": "first", "reuse_bonus_s": 100.0}, "first"),
        (WINDOWS, {"policy": "chat"}, "chat"),
        (WINDOWS, {"policy": "lru"}, "lru"),
        (STATES, {}, ""),
        (STATES, {"policy": "first"}, ""),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_policy_of_each_kind_of_model(
    shape: Shape, settings: dict[str, object], policy: str, asynchronous: bool
) -> None:
    pool = Engine(replace(shape, asynchronous=asynchronous), parse(settings)).pool
    assert type(pool).__name__ == ("PolicyPool" if policy else "BlockPool")
    assert state.state()["parts"]["pool"] is True
    if policy:
        assert pool.free_block_queue.policy.name == policy
