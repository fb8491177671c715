"""A second tier of either kind, against models that move node by node."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.base.errors import UsageError
from kvtune.reading.bounds.given import parse_tiers
from kvtune.reading.bounds.ladder import bounds, tier_rungs
from kvtune.reading.bounds.paths import paths_of
from tests.reading.bounds.test_bounds import NODE, leading, prefixes, tree_paths, workload

Cache = OrderedDict[tuple[int, ...], None]


def naive_tiers(prompts: list[tuple[int, ...]], pool_size: int, tier_size: int, *, exclusive: bool) -> int:
    """Nodes that hit in the pool, or from where the pool ends in the tier."""
    pool: Cache = OrderedDict()
    tier: Cache = OrderedDict()
    hits = 0
    for prompt in prompts:
        path = prefixes(prompt)
        hits += leading(path, {**pool, **tier})
        for node in reversed(path):  # the shallowest is used last, and evicted last
            pool[node] = None
            pool.move_to_end(node)
            if exclusive:
                tier.pop(node, None)
            else:
                tier[node] = None
                tier.move_to_end(node)
        while len(pool) > pool_size:
            node, _ = pool.popitem(last=False)
            if exclusive:
                tier[node] = None
        while len(tier) > tier_size:
            tier.popitem(last=False)
    return hits


@given(tree_paths, st.integers(5, 9), st.integers(1, 3))
def test_both_kinds_hit_what_a_model_of_two_caches_hits(
    prompts: list[tuple[int, ...]], pool: int, factor: int
) -> None:
    paths = paths_of(workload(prompts), NODE, answers=False)
    (rung,) = tier_rungs(paths, paths, pool, [factor], NODE, 0)
    total = sum(paths.prompt_tokens)
    for kind, share in ((False, rung.inclusive), (True, rung.exclusive)):
        hits = naive_tiers(prompts, pool, pool * factor, exclusive=kind)
        assert share == pytest.approx(hits * NODE / total)
    assert rung.inclusive <= rung.exclusive <= rung.optimum + 1e-12


def test_an_inclusive_tier_as_large_as_the_pool_adds_nothing() -> None:
    prompts = [(n % 7, n % 3) for n in range(60)]
    ladder = bounds(workload(prompts), [8], block_tokens=NODE, tiers=[1, 2])
    (rung,) = ladder.curve
    same, double = rung.tiers
    assert same.inclusive == rung.lru < same.exclusive
    assert double.tier_blocks == 16 and double.inclusive == same.exclusive


@pytest.mark.parametrize("text", ["0x", "-1x", "two", "inf", "nanx"])
def test_sizes_that_are_no_multiples_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--tier"):
        parse_tiers(text)


def test_sizes_are_sorted_multiples() -> None:
    assert parse_tiers("8x,1x, 2,2x") == [1.0, 2.0, 8.0]
