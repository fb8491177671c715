"""One number for what a scheduler decided in a step: two engines that decide alike give the same sequence.

Runs in EngineCore (the probe) and in the simulator. Covers the scheduled tokens and the block ids handed out, in the
scheduler's order; not request ids, which a front end may decorate.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from zlib import crc32

from kvtune.core.vllm_types import ScheduledStep


def digest(scheduler_output: ScheduledStep, seed: int = 0) -> int:
    """32 bits over one vLLM SchedulerOutput; give the last one as `seed` to chain steps."""
    numbers = array("q", scheduler_output.num_scheduled_tokens.values())
    for new in scheduler_output.scheduled_new_reqs:
        _add_blocks(numbers, new.block_ids)
        numbers.append(new.num_computed_tokens)
    cached = scheduler_output.scheduled_cached_reqs
    for blocks in cached.new_block_ids:
        _add_blocks(numbers, blocks or ())
    numbers.extend(cached.num_computed_tokens)
    return crc32(numbers.tobytes(), seed)


def _add_blocks(numbers: array[int], groups: Iterable[Iterable[int]]) -> None:
    for blocks in groups:
        numbers.append(-1)
        numbers.extend(blocks)
