"""Legacy switches: stock's decisions, made with the data structures of older versions of vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from kvtune.core import state
from kvtune.core.cache import audit, legacy
from kvtune.core.settings import CoreSettings, parse
from kvtune.core.steps import scheduler
from tests.core.pool_rig import BOTH, SHAPES, Engine, random_steps
from tests.core.steady_rig import inside

pytestmark = pytest.mark.vllm


@BOTH
@pytest.mark.parametrize("shape", ["full", "small_hybrid"])
def test_linear_removal_gives_stocks_blocks(shape: str, asynchronous: bool) -> None:
    made = replace(SHAPES[shape], asynchronous=asynchronous)
    ours, stock = Engine(made, parse({"legacy_free_list": True})), Engine(made, None)
    assert type(ours.pool.free_block_queue) is legacy.LinearQueue
    assert type(ours.pool) is BlockPool
    logs: list[list[Any]] = [[], []]
    for engine, log in zip((ours, stock), logs, strict=True):
        random_steps(engine, 5, 200, lambda e=engine, found=log: found.append(inside(e.scheduler)))
    assert logs[0] == logs[1]
    assert audit.check(ours.scheduler) == []
    assert state.state()["parts"]["pinning"] is False
    assert "pool: legacy_free_list is on" in state.state()["notes"]


@BOTH
def test_each_empty_list_is_new_and_nothing_else_changes(asynchronous: bool) -> None:
    made = replace(SHAPES["small_hybrid"], asynchronous=asynchronous)
    settings = parse({"legacy_empty_blocks": True, "pool": False})
    stock = Engine(made, None)
    expected: list[Any] = []
    random_steps(stock, 5, 120, lambda: expected.append(inside(stock.scheduler)))
    legacy.install(settings)
    try:
        ours = Engine(made, settings)
        scheduler.adopt(ours.scheduler, settings)
        manager = ours.scheduler.kv_cache_manager
        empty = manager.create_kv_cache_blocks(([], [], []))
        assert empty == manager.create_kv_cache_blocks(([], [], []))
        assert empty is not manager.create_kv_cache_blocks(([], [], []))
        collected: list[Any] = []
        random_steps(ours, 5, 120, lambda: collected.append(inside(ours.scheduler)))
    finally:
        legacy.uninstall()
    assert collected == expected
    assert stock.scheduler.kv_cache_manager.create_kv_cache_blocks(([], [], [])) is (
        stock.scheduler.kv_cache_manager.empty_kv_cache_blocks
    )
    assert state.state()["parts"]["steady"] is False


def test_nothing_is_legacy_by_default() -> None:
    assert not CoreSettings().legacy_empty_blocks and not CoreSettings().legacy_free_list
