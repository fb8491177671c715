"""A pool as a policy sees it, and nothing of vLLM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from kvtune.core.policies.density import Density
from kvtune.core.policies.placing import REUSED, SINGLE
from kvtune.core.settings import CoreSettings


class Pool:
    """Blocks by number as a policy sees them, prompts of single blocks, one after another; keys are numbers."""

    def __init__(self, blocks: int, **settings: Any) -> None:
        self.num_blocks = blocks
        self.grade_of = bytearray(blocks)
        self.window_groups: frozenset[bytes] = frozenset()
        self.queues: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(7)]
        self.blank = list(range(blocks))
        self.holds: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self.policy = Density(self, CoreSettings(**settings))
        self.hits = 0

    @property
    def num_free_blocks(self) -> int:
        return len(self.blank) + sum(map(len, self.queues))

    def size(self, tier: int) -> int:
        return len(self.queues[tier])

    def head(self, tier: int) -> int:
        return next(iter(self.queues[tier]), -1)

    def before(self, tier: int, order: Sequence[int], value: int, most: int) -> int:
        head = list(islice(self.queues[tier], most))
        return next((at for at, block in enumerate(head) if order[block] >= value), len(head))

    def demote(self, tier: int, to: int) -> None:
        raise AssertionError

    def take(self) -> int:
        if self.blank:
            return self.blank.pop()
        tier, count = self.policy.choose(1)
        assert abs(count) == 1
        if tier == REUSED and self.size(SINGLE):
            freed_at = self.policy.freed_at
            assert freed_at[self.head(REUSED)] < freed_at[self.head(SINGLE)]
        block, _ = self.queues[tier].popitem(last=count < 0)
        key = self.key_of.pop(block)
        del self.holds[key]
        self.policy.evicted([block], [b"%032d" % key])
        return block

    def ask(self, key: int) -> bool:
        """One prompt of one block; whether it was there."""
        block = self.holds.get(key, -1)
        found = block >= 0
        if found:
            for queue in self.queues:
                queue.pop(block, None)
            self.policy.hit([block])
        else:
            block = self.take()
            self.holds[key] = block
            self.key_of[block] = key
            self.policy.stored([block], [b"%032d" % key], False, False)
        self.queues[self.policy.place([block])[0]][block] = None
        self.hits += found
        return found


BLOCKS = 640
EVERY_GROUP = frozenset(b"%04d" % number for number in range(10_000))


class Windows(Pool):
    """A pool whose blocks are all a window group's."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks)
        self.window_groups = EVERY_GROUP
        self.keys: Iterator[int] = iter(range(10**6, 10**9))

    def add(self, grade: int = 0, key: int | None = None) -> int:
        """A new block of that grade, which becomes free; its key."""
        key = next(self.keys) if key is None else key
        block = self.take()
        self.holds[key], self.key_of[block], self.grade_of[block] = block, key, grade
        self.policy.stored([block], [b"%032d" % key], False, False)
        self.queues[self.policy.place([block])[0]][block] = None
        return key


def fill(pool: Windows, grade: int) -> tuple[list[int], list[int]]:
    """Ordinary blocks, then as many of the grade, until the pool is full."""
    ordinary = [pool.add() for _ in range(BLOCKS // 2)]
    return ordinary, [pool.add(grade) for _ in range(BLOCKS - BLOCKS // 2)]
