"""Which of ten blocks goes next, by order. docs/core.md shows the same blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.core.policies import FAR, NEAR, OUTPUT, SPECULATIVE, WINDOW
from kvtune.plugin.core.policies.make import make

BLOCKS = {
    1: ("full attention, used once", WINDOW),
    2: ("slack near the prompt's end", NEAR),
    3: ("slack far from it", FAR),
    4: ("a speculative window", SPECULATIVE),
    5: ("the window at the output's end", OUTPUT),
    6: ("full attention, hit by a second prompt", WINDOW),
    7: ("the window at the prompt's end", WINDOW),
    8: ("another speculative window", SPECULATIVE),
    9: ("an output's window behind which the conversation went on", OUTPUT),
}
"""Freed in this order, one a second. Block 10 has no hash: no order ever sees it, and it goes before all of these."""
HIT, LEFT = 6, 9


class Shelf:
    """The queues of a pool, without vLLM's blocks."""

    num_blocks = 16

    def __init__(self) -> None:
        self.grade_of = bytearray(self.num_blocks)
        self.queues: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(8)]

    def size(self, queue: int) -> int:
        return len(self.queues[queue])

    def head(self, queue: int) -> int:
        return next(iter(self.queues[queue]), -1)

    def before(self, queue: int, times: Sequence[float], time: float, most: int) -> int:
        head = list(islice(self.queues[queue], most))
        return next((at for at, block in enumerate(head) if times[block] >= time), len(head))


@pytest.fixture
def clock() -> Iterator[list[float]]:
    now_s = [0.0]
    with state.using(state.Books(lambda: now_s[0])):
        yield now_s


def given_out(order: str, clock: list[float], wanted: int = 1, **settings: Any) -> list[int]:
    """The ten blocks in the order in which they are given out, block 10 first."""
    shelf = Shelf()
    policy = make(order, shelf, CoreSettings(**settings))
    for block, (_, grade) in BLOCKS.items():
        clock[0] = float(block)
        shelf.grade_of[block] = grade
        policy.stored([block], [b"%d" % block], False)
        if block == HIT:
            policy.hit([block])
        if block == LEFT:
            policy.left([block])
        shelf.queues[policy.place([block])[0]][block] = None
    out = [10]
    while len(out) < 10:
        queue, count = policy.choose(min(wanted, 10 - len(out)))
        assert 0 < count <= min(wanted, shelf.size(queue))
        out += [shelf.queues[queue].popitem(last=False)[0] for _ in range(count)]
    return out


@pytest.mark.parametrize(
    ("order", "settings", "blocks"),
    [
        ("first", {}, [10, 4, 8, 3, 2, 5, 9, 1, 6, 7]),
        ("chat", {}, [10, 4, 8, 9, 3, 2, 1, 5, 6, 7]),
        ("two_class", {"reuse_bonus_s": 1e9}, [10, 4, 8, 3, 2, 5, 9, 1, 7, 6]),
        ("two_class", {"reuse_bonus_s": 0.5}, [10, 4, 8, 3, 2, 5, 9, 1, 6, 7]),
        ("pin", {}, [10, 1, 2, 3, 5, 6, 7, 9, 4, 8]),
        ("lru", {}, [10, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
@pytest.mark.parametrize("wanted", [1, 3, 16])
def test_which_of_ten_blocks_goes_next(
    order: str, settings: dict[str, float], blocks: list[int], wanted: int, clock: list[float]
) -> None:
    assert given_out(order, clock, wanted, **settings) == blocks


def test_a_window_that_is_hit_again_was_not_left(clock: list[float]) -> None:
    shelf = Shelf()
    policy = make("chat", shelf, CoreSettings())
    policy.left([1, 2])
    policy.hit([2])
    assert policy.place([1, 2]) == [1, 4]
    policy.evicted([1], [b"1"])
    assert policy.place([1]) == [4], "another content's block"


@pytest.mark.parametrize(("factor", "reused"), [(1.0, True), (0.0, False)])
def test_a_block_that_comes_back_after_its_eviction_is_reused(
    factor: float, reused: bool, clock: list[float]
) -> None:
    shelf = Shelf()
    policy = make("two_class", shelf, CoreSettings(reuse_bonus_s=1.0, ghost_factor=factor))
    policy.stored([1], [b"content"], False)
    policy.evicted([1], [b"content"])
    policy.stored([2], [b"content"], False)
    assert policy.place([1, 2]) == [4, 5 if reused else 4]


def test_a_block_whose_content_another_block_has_is_reused(clock: list[float]) -> None:
    policy = make("two_class", Shelf(), CoreSettings(reuse_bonus_s=1.0))
    policy.stored([1], [b"content"], True)
    assert policy.place([1]) == [5]
    policy.reset()
    assert policy.place([1]) == [4]
