"""Which free block is given out next: one policy, one file. Runs in EngineCore.

A policy orders *hashed* free blocks in tiers (FIFO queues that the pool links); blocks without a hash are always
given out first and never reach it. It holds no blocks, only numbers, so that it cannot lose one.

    the pool calls                      when
    place(block_ids) -> tiers           hashed blocks became free; each goes to the tail of its tier
    choose(wanted) -> (tier, count)     blocks are needed: take `count` (1..wanted) from the head of `tier`; -count:
                                        from its tail, the newest
    hit(block_ids)                      a prompt hit these blocks (free or in use)
    resumed(blocks, kept, grade)        a prompt hit `blocks` blocks and resumes in a window of this grade
    retired(block_ids)                  a conversation goes on behind them: they are not expected to be hit again
    needed(block_ids)                   but these are part of the window at its own prompt's end, too
    expected(block_ids)                 a conversation that went on before will probably go on behind them
    stored(block_ids, keys, resident, anyway)
                                        blocks got their hashes; `resident`: other blocks have the same; `anyway`: they
                                        were computed whatever is cached: an output's, and that of a prompt's last token
    evicted(block_ids, keys)            blocks lost their hashes because they were given out
    replaced(block_id, anyway)          a free block's content was computed again: it is blank now (if `replaces`)
    reset()                             the whole prefix cache was dropped
    counters() -> {name: count}         the run file is written

`tiers` names the tiers in the order in which they are emptied when the policy fails. Hooks that a policy does not
override are skipped.
`Shelves` is what a policy may see and do in `choose`: sizes, heads, runs of blocks, and demote (head of one tier to
another's tail).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

WINDOW, NEAR, FAR, SPECULATIVE, OUTPUT, OUTPUT_END = range(6)
"""Grades: why a block is kept. WINDOW is what stock keeps, full attention too; the others occur with pinning only.
NEAR and FAR are the slack, SPECULATIVE the windows before it. Where an output ends, and a chat continues: OUTPUT is
what its window adds to the prompt's own, OUTPUT_END the last block of that."""


class Shelves(Protocol):
    """The pool as policies see it."""

    num_blocks: int
    num_free_blocks: int
    grade_of: bytearray
    window_groups: frozenset[bytes]
    """How keys of sliding-window groups' blocks end."""

    def size(self, tier: int) -> int:
        """Blocks in a tier."""

    def head(self, tier: int) -> int:
        """The block at a tier's head; -1 when it is empty."""

    def before(self, tier: int, order: Sequence[int], value: int, most: int) -> int:
        """How many blocks from the head of a tier, up to `most`, have an `order` below the value."""

    def demote(self, tier: int, to: int) -> None:
        """Move the head of `tier` to the tail of `to`."""


class Policy(Protocol):
    name: str
    tiers: tuple[str, ...]
    replaces: bool

    def place(self, block_ids: Sequence[int]) -> list[int]: ...
    def choose(self, wanted: int) -> tuple[int, int]: ...
    def hit(self, block_ids: Sequence[int]) -> None: ...
    def resumed(self, blocks: int, kept: int, grade: int) -> None: ...
    def retired(self, block_ids: Sequence[int]) -> None: ...
    def needed(self, block_ids: Sequence[int]) -> None: ...
    def expected(self, block_ids: Sequence[int]) -> None: ...
    def stored(
        self, block_ids: Sequence[int], keys: Sequence[bytes], resident: bool, anyway: bool
    ) -> None: ...
    def evicted(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None: ...
    def replaced(self, block_id: int, anyway: bool) -> None: ...
    def reset(self) -> None: ...
    def counters(self) -> dict[str, int]: ...
