"""Which free block is given out next: one order, one module. Runs in EngineCore.

An order sorts *hashed* free blocks into FIFO queues, which the pool links. Blocks without a hash are always given
out first and never reach it. It holds no blocks, only their numbers, so it cannot lose one.

    the pool calls                           when
    place(block_ids) -> queues               hashed blocks became free; each goes to the tail of its queue
    choose(wanted) -> (queue, count)         blocks are needed: take `count` (1..wanted) from the head of `queue`
    hit(block_ids)                           a prompt hit these blocks (free or in use)
    left(block_ids)                          a conversation continued after these: its next turn resumes farther on
    stored(block_ids, keys, resident)        blocks got their hashes; `resident`: other blocks have the same
    evicted(block_ids, keys)                 blocks lost their hashes
    reset()                                  the whole prefix cache was dropped

`queues` names the queues in the order in which they are emptied when the order fails. Hooks that an order does not
override are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

WINDOW, NEAR, FAR, SPECULATIVE, OUTPUT = range(5)
"""Grades: why a block is kept. WINDOW is what stock keeps, full attention too. The others are extras, which only
pinning keeps: NEAR and FAR are the slack, SPECULATIVE the windows before it, OUTPUT the window at an output's end."""


class Shelves(Protocol):
    """The pool as an order sees it."""

    num_blocks: int
    grade_of: bytearray

    def size(self, queue: int) -> int:
        """Blocks in a queue."""

    def head(self, queue: int) -> int:
        """The block at a queue's head; -1 when it is empty."""

    def before(self, queue: int, times: Sequence[float], time: float, most: int) -> int:
        """How many blocks from the head of a queue, up to `most`, have times before this one."""


class Policy(Protocol):
    name: str
    queues: tuple[str, ...]
    extras_first: bool
    """Extras are evicted before all blocks that stock keeps, which then stay as long as in stock (cache/manager.py)."""

    def place(self, block_ids: Sequence[int]) -> list[int]: ...
    def choose(self, wanted: int) -> tuple[int, int]: ...
    def hit(self, block_ids: Sequence[int]) -> None: ...
    def left(self, block_ids: Sequence[int]) -> None: ...
    def stored(self, block_ids: Sequence[int], keys: Sequence[bytes], resident: bool) -> None: ...
    def evicted(self, block_ids: Sequence[int], keys: Sequence[bytes]) -> None: ...
    def reset(self) -> None: ...
