"""Suits prefixes that come back after long gaps: reused blocks outlive those used once.

    queue                holds
    speculative .. near  extras, as in `first`
    single               blocks that were used once
    reused               blocks that were hit, or came back after their eviction

After the extras, the oldest single block is evicted, unless the oldest reused block became free more than
`reuse_bonus_s` seconds before it. With 0 this is `first`; with 1e9 reused blocks are evicted only when no single block
is left. The last evicted hashes are remembered, `ghost_factor` times the pool's size, without a gap: with a gap, one
block of a prefix that came back would count as single, and after its early eviction the rest of the prefix could not
be hit.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from zlib import crc32

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.core.policies import PoolView
from kvtune.plugin.core.policies.in_order import AGED, EXTRAS, First


class Remembered:
    """The last `size` hashes that were added, without those taken since."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.added = 0
        self.buckets = max(1, size // 2)
        self.marks = array("I", [0]) * size
        # Of each slot: the next older slot of its bucket, plus one (0: none).
        self.older = array("I", [0]) * size
        self.first = array("I", [0]) * self.buckets  # of each bucket: its newest slot, plus one (0: none)
        self.taken = bytearray(size)  # of each slot: 1 for a hash that came back

    def add_all(self, keys: Iterable[bytes]) -> None:
        """Remember these hashes in this order."""
        size, buckets, first, older = self.size, self.buckets, self.first, self.older
        if not size:
            return
        for checksum in map(crc32, keys):
            place = self.added % size
            if self.added >= size:
                self._drop(place)
            self.added += 1
            bucket = checksum % buckets
            self.marks[place] = checksum
            self.taken[place] = 0
            older[place] = first[bucket]
            first[bucket] = place + 1

    def take_all(self, keys: Iterable[bytes]) -> set[bytes]:
        """Return those of `keys` that are remembered, and forget them."""
        keys_seen: set[bytes] = set()
        if not self.size:
            return keys_seen
        marks, older, first, taken = self.marks, self.older, self.first, self.taken
        for key in keys:
            checksum = crc32(key)  # well spread, even where hashes are not random (tests, traces)
            slot = first[checksum % self.buckets]
            while slot and marks[slot - 1] != checksum:
                slot = older[slot - 1]
            if slot and not taken[slot - 1]:
                keys_seen.add(key)
                taken[slot - 1] = 1
        return keys_seen

    def _drop(self, place: int) -> None:
        """Forget the hash in slot `place`: the oldest of all, so the last of its chain."""
        first, older = self.first, self.older
        bucket = self.marks[place] % self.buckets
        oldest = place + 1
        slot = first[bucket]
        if slot == oldest:
            first[bucket] = 0
            return
        while older[slot - 1] != oldest:
            slot = older[slot - 1]
        older[slot - 1] = 0


SINGLE, REUSED = AGED, AGED + 1


class TwoClass(First):
    name = "two_class"
    queues = (*EXTRAS, "single", "reused")

    def __init__(self, pool: PoolView, settings: CoreSettings) -> None:
        super().__init__(pool, settings)
        self.bonus_s = settings.reuse_bonus_s
        self.ghost_size = int(settings.ghost_factor * pool.num_blocks)
        self.reset()

    def reset(self) -> None:
        self.reused = bytearray(self.pool.num_blocks)
        self.freed_s = array("d", bytes(8 * self.pool.num_blocks))
        self.ghost = Remembered(self.ghost_size)

    def place(self, block_ids: Sequence[int]) -> list[int]:
        now_s, freed_s, reused = state.clock(), self.freed_s, self.reused
        for block_id in block_ids:
            freed_s[block_id] = now_s
        queues = super().place(block_ids)
        return [
            REUSED if queue == SINGLE and reused[block_id] else queue
            for block_id, queue in zip(block_ids, queues, strict=True)
        ]

    def choose(self, wanted: int) -> tuple[int, int]:
        queue, count = super().choose(wanted)
        head, before, freed_s = self.pool.head, self.pool.before, self.freed_s
        if queue != SINGLE or head(REUSED) < 0:
            return queue, count
        single_s, reused_s = freed_s[head(SINGLE)], freed_s[head(REUSED)]
        if single_s - reused_s > self.bonus_s:
            return REUSED, max(1, before(REUSED, freed_s, single_s - self.bonus_s, wanted))
        return SINGLE, max(1, before(SINGLE, freed_s, reused_s + self.bonus_s, wanted))

    def hit(self, block_ids: Sequence[int]) -> None:
        reused = self.reused
        for block_id in block_ids:
            reused[block_id] = 1

    def stored(self, block_ids: Sequence[int], keys: Sequence[bytes], resident: bool) -> None:
        back = self.ghost.take_all(keys)
        for block_id, key in zip(block_ids, keys, strict=True):
            if resident or key in back:
                self.reused[block_id] = 1

    def evicted(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None:
        for block_id in block_ids:
            self.reused[block_id] = 0
        self.ghost.add_all(keys)
