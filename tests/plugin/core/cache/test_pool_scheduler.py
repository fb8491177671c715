"""The core's pool under vLLM's real schedulers, sync and async: audited after every step, or equal to stock's.

Preemption (small pools), aborts, priorities, resets, evictions, shared prefixes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

pytest.importorskip("vllm")

from bench import audit
from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.core.breaker import Breaker
from kvtune.plugin.core.settings import parse
from tests.plugin.core.pool_rig import BOTH, HYBRID, SETTINGS, SHAPES, Engine, random_steps, tokens
from tests.plugin.core.steady_rig import inside

pytestmark = pytest.mark.vllm


EACH = {
    (shape, list(SETTINGS)[number % len(SETTINGS)], bool(number % 2)) for number, shape in enumerate(SHAPES)
}
"""Each shape and each setting once, in `make test`."""


@pytest.mark.parametrize(
    ("shape", "settings", "asynchronous"),
    [
        pytest.param(*row, marks=() if row in EACH else pytest.mark.full)
        for row in product(SHAPES, SETTINGS, (False, True))
    ],
)
def test_invariants_hold_after_every_step(shape: str, settings: str, asynchronous: bool) -> None:
    engine = Engine(replace(SHAPES[shape], asynchronous=asynchronous), parse(SETTINGS[settings]), seed=1)

    def each() -> None:
        problems = audit.check(engine.scheduler)
        assert not problems, problems

    random_steps(engine, seed=1, steps=90, each=each)
    engine.drain()
    assert audit.check(engine.scheduler) == []
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert not state.state()["notes"] or all("failed" not in note for note in state.state()["notes"])


@BOTH
@pytest.mark.parametrize("shape", ["full", "small_hybrid", "dense", "interval"])
def test_switched_off_or_plain_lru_decides_as_stock_does(shape: str, asynchronous: bool) -> None:
    """Block ids, scheduled tokens and the cache's contents, step by step."""
    made = replace(SHAPES[shape], asynchronous=asynchronous)
    settings = parse({} if shape == "full" else {"pinning": False, "policy": "lru"})
    ours, stock = Engine(made, settings), Engine(made, None)
    for engine in (ours, stock):
        engine.log = []  # type: ignore[attr-defined]
        step = engine.step
        random_steps(engine, 3, 200, lambda e=engine: e.log.append(inside(e.scheduler)))
        assert step
    assert ours.log == stock.log  # type: ignore[attr-defined]


@BOTH
def test_the_pool_with_policy_lru_gives_stocks_blocks(asynchronous: bool) -> None:
    """The same, with the pool itself in place (adopt leaves it out when policy lru needs nothing of it)."""
    from kvtune.plugin.core.cache.pool import PolicyPool

    made = replace(SHAPES["small_hybrid"], asynchronous=asynchronous)
    ours, stock = Engine(made, None), Engine(made, None)
    ours.pool.__class__ = PolicyPool
    ours.pool.adopt_queues("lru", CoreSettings(), Breaker())
    logs: list[list[Any]] = [[], []]
    for engine, log in zip((ours, stock), logs, strict=True):
        random_steps(engine, 5, 300, lambda e=engine, found=log: found.append(inside(e.scheduler)))
    for mine, theirs in zip(*logs, strict=True):
        assert mine == theirs


def test_reset_gives_everything_up() -> None:
    engine = Engine(HYBRID, parse({"min_drop": 2}))
    prefix = tokens(1, 200)
    engine.serve(prefix)
    assert engine.serve(prefix) > 0
    assert engine.scheduler.reset_prefix_cache()
    assert engine.serve(prefix) == 0
    assert audit.check(engine.scheduler) == []


@pytest.mark.parametrize("policy", ["first", "chat", "two_class", "pin"])
def test_a_pool_is_as_good_after_a_reset_as_before(policy: str) -> None:
    """Blocks that lost their hash must not wait in a late queue while hashed ones are given out."""
    engine = Engine(replace(HYBRID, blocks=600), parse({"policy": policy, "min_drop": 2}))
    collected = []
    for _ in range(4):
        assert engine.scheduler.reset_prefix_cache()
        visits = [
            [engine.serve(tokens(i, 160) + tokens(100 * v + i, 6)) for i in range(8)] for v in (1, 2, 3)
        ]
        collected.append([sum(visit) for visit in visits])
    assert collected[0][2] > 0 and collected == [collected[0]] * 4
