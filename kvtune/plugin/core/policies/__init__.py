"""Eviction policies: which free block is given out next. Runs in EngineCore.

A policy sorts free blocks that have a hash into FIFO queues, which the pool links. Blocks without a hash are always
given out first and never reach a policy. A policy holds only block numbers, so it cannot lose a block.

    the pool calls                           when
    place(block_ids) -> queues               hashed blocks became free; each goes to the tail of its queue
    choose(wanted) -> (queue, count)         blocks are needed: take `count` (1..wanted) from the head of `queue`
    hit(block_ids)                           a prompt hit these blocks (free or in use)
    left(block_ids)                          a conversation went on past these: its next turn resumes later
    stored(block_ids, keys, resident)        blocks got their hashes; `resident`: another block has that hash
    evicted(block_ids, keys)                 blocks lost their hashes
    reset()                                  the whole prefix cache was dropped

`queues` names the queues, in the order in which vLLM's one queue gets their blocks if the policy fails. Hooks that a
policy does not override are never called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

WINDOW, NEAR, FAR, SPECULATIVE, OUTPUT = range(5)
"""Grades: why a block is kept. WINDOW: stock keeps it, too (full attention included). The others are extras, which only
pinning keeps: NEAR and FAR are the slack, SPECULATIVE the windows before it, OUTPUT the window at an output's end."""


class PoolView(Protocol):
    """The pool as a policy sees it. A policy's queues are numbered from 1."""

    num_blocks: int
    grade_of: bytearray

    def size(self, queue: int) -> int:
        """Return the number of blocks in a queue."""

    def head(self, queue: int) -> int:
        """Return the number of the block at a queue's head, or -1 if the queue is empty."""

    def before(self, queue: int, times: Sequence[float], time: float, most: int) -> int:
        """Return how many blocks from a queue's head, at most `most`, have `times[block] < time`."""
