"""What the probe says was evicted is what vLLM's pool evicted, block for block, on stock's queue and on queues."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

from kvtune.knobs import CoreSettings
from kvtune.probe.pool import PoolWatch
from tests.core.pool_rig import Engine
from tests.core.steady_rig import Shape

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("core", [None, CoreSettings()])
def test_evictions_are_the_pools_own(core: CoreSettings | None) -> None:
    shape = Shape(windows=(12,), blocks=120)
    engine = Engine(shape, core)
    take, evicted = engine.pool.get_new_blocks, list[bool]()

    def watched(count: int) -> list[Any]:
        hashed = {block.block_id for block in engine.pool.blocks if block.block_hash is not None}
        blocks: list[Any] = take(count)
        evicted.extend(block.block_id in hashed and block.block_hash is None for block in blocks)
        return blocks

    engine.pool.get_new_blocks = watched
    watch = PoolWatch(engine.pool)
    reported = 0
    for number in range(60):
        engine.add([number % 7 * 1000 + i for i in range(shape.block * 9)], 5)
        for _ in range(6):
            engine.step()
            if (news := watch.news()) is not None:
                reported += sum(news)
    assert reported == sum(evicted) > 50
