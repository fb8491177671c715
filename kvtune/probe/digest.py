"""A checksum of a step's scheduling decisions, to compare two engines step by step. EngineCore and simulator.

It covers scheduled tokens and block ids in the scheduler's order. It leaves out request ids, because a front end may
add a suffix to them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from zlib import crc32

from kvtune.vllm.types import ScheduledStep


def digest(scheduler_output: ScheduledStep) -> int:
    """Return a 32-bit checksum of one vLLM SchedulerOutput."""
    numbers = array("q", scheduler_output.num_scheduled_tokens.values())
    for new in scheduler_output.scheduled_new_reqs:
        _add_blocks(numbers, new.block_ids)
        numbers.append(new.num_computed_tokens)
    cached = scheduler_output.scheduled_cached_reqs
    for blocks in cached.new_block_ids:
        _add_blocks(numbers, blocks or ())
    numbers.extend(cached.num_computed_tokens)
    return crc32(numbers.tobytes())


def _add_blocks(numbers: array[int], groups: Iterable[Iterable[int]]) -> None:
    for blocks in groups:
        numbers.append(-1)
        numbers.extend(blocks)
