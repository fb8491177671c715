"""What a server's prefix cache holds, by its KV events: the blocks of each of its data-parallel ranks. Pure."""

from __future__ import annotations

import contextlib
import gc
import statistics
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from kvtune.servers.watch.blocks import Blocks, Evicted, Stretch
from kvtune.servers.watch.events import Hash, Received

AGES_S = 60
"""Seconds for which the ages of evicted blocks are kept."""
MOST_HELD_BYTES = 400 << 20
"""Most memory for the blocks of all ranks: about 600 bytes a block (measured: 550), and its tokens."""
BLOCK_BYTES = 600
LOOK_CPU_S, BYTES_CPU_S = 2.0, 16 << 20
"""CPU time in which what came until a look is counted, and memory of batches that gives a second more: long prompts
need a tenth of it, prompts of one block six tenths."""
MOST_AGES = 100_000
MOST_WALKED = 4_000_000
"""Most blocks before the stretches of one batch: 64 prompts of a million tokens. A batch with more is not counted."""


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for circles of garbage rarely: caches hold a million objects, and make none."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(slots=True)
class Cache:
    """`complete`: no event since the server's start is missing. `by_content`: other servers compare their blocks.

    Beyond `most_bytes`, the blocks that were evicted first are forgotten.
    """

    complete: bool = True
    by_content: bool = False
    most_bytes: int = MOST_HELD_BYTES
    blocks: dict[int, Blocks] = field(default_factory=dict)
    """Those of each rank."""
    evicted_blocks: int = 0
    resets: int = 0
    """How often the cache was reset."""
    ages: deque[tuple[float, Counter[float]]] = field(default_factory=deque)
    """Evictions of the last AGES_S: a step's time, and how often each number of seconds since a block was stored."""
    _ages: int = 0
    """How many different ages these are."""
    _walked: int = 0
    """Blocks before the stretches of this batch."""

    def stretches(self, received: Received) -> Iterator[tuple[Stretch, Blocks]]:
        """Yield each stretch of a batch, with its rank's blocks as they were before the stretch."""
        batch, rank = received.batch, received.rank
        self._walked = 0
        if received.fresh:
            self.forget(rank)
        blocks = self.blocks.get(rank)
        if blocks is None:
            blocks = self.blocks[rank] = Blocks(rank, by_content=self.by_content)
        evicted, resets = Evicted(), blocks.resets
        for stretch in blocks.stretches(batch, evicted):
            yield stretch, blocks
        self.resets += blocks.resets - resets
        self.evicted_blocks += evicted.blocks
        if evicted.ages_s:
            self.ages.append((batch.ts, evicted.ages_s))
            self._ages += len(evicted.ages_s)
        while self.ages and (self.ages[0][0] < batch.ts - AGES_S or self._ages > MOST_AGES):
            self._ages -= len(self.ages.popleft()[1])
        over = -(-(self.held_bytes - self.most_bytes) // BLOCK_BYTES)
        while over > 0 and (
            count := max(self.blocks.values(), key=lambda each: each.remembered).forget(over)
        ):
            over -= count

    def before(self, stretch: Stretch, blocks: Blocks) -> list[Hash]:
        """Return the chain of blocks before a stretch of this batch. ValueError if there are too many."""
        chain = blocks.chain(stretch.parent)
        self._walked += len(chain)
        if self._walked > MOST_WALKED:
            raise ValueError(f"a step has more than {MOST_WALKED:,} blocks of context")
        return chain

    def forget(self, rank: int) -> None:
        """Begin with an empty cache, because the rank was restarted."""
        self.blocks.pop(rank, None)

    @property
    def held_bytes(self) -> int:
        """About the memory that the known blocks take."""
        ranks = self.blocks.values()
        count = sum(len(b.known) + len(b.tier.held) + len(b.tier.gone) for b in ranks)
        return sum(blocks.bytes for blocks in ranks) + BLOCK_BYTES * count

    @property
    def forgotten(self) -> int:
        """The evicted blocks that are not known any more."""
        return sum(blocks.forgotten for blocks in self.blocks.values())

    @property
    def block_size(self) -> int:
        """The tokens of the largest block of which an event came; 0 before."""
        groups = (group for blocks in self.blocks.values() for group in blocks.groups.values())
        return max((group.block_size for group in groups), default=0)

    @property
    def loads_told(self) -> bool:
        """Whether events tell what was loaded from tiers: all of them since the start."""
        return self.complete and any(blocks.tier.stored for blocks in self.blocks.values())

    def median_age_s(self, since: float) -> float | None:
        """Return the median age of the blocks that were evicted since then; None if there is none."""
        counts: Counter[float] = Counter()
        for when, ages_s in self.ages:
            if when >= since:
                counts.update(ages_s)
        ages = sorted(counts)
        ends = list(accumulate(counts[age] for age in ages))
        middles = ((ends[-1] - 1) // 2, ends[-1] // 2) if ends else ()
        return statistics.mean(ages[bisect_right(ends, n)] for n in middles) if middles else None
