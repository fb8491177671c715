"""The longest agreement with an earlier prompt, against comparing with each of them."""

from __future__ import annotations

import random

import pytest

from kvtune.requests.log.token_ids import Prefixes, agreeing, packed, unpacked


@pytest.mark.parametrize("seed", range(20))
def test_the_first_of_the_prompts_that_agree_for_longest(seed: int) -> None:
    draw = random.Random(seed)
    known: Prefixes[int] = Prefixes()
    added: list[bytes] = []
    for number in range(60):
        prompt = packed([draw.randrange(3) for _ in range(draw.randrange(12))])
        shared = [agreeing(prompt, other) for other in added]
        most = max(shared, default=0)
        assert known.longest(prompt) == (most, shared.index(most) if most else None)
        known.add(prompt, number)
        added.append(prompt)


def test_tokens_that_are_packed_sort_as_numbers() -> None:
    assert packed([1, 256]) > packed([1, 2])
    assert unpacked(packed([1, 1 << 31])) == [1, 1 << 31]
