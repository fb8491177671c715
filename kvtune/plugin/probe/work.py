"""Counts the work in a step, from its SchedulerOutput: prompt tokens, and KV tokens that requests attend to.

Runs in EngineCore: in the step probe, and in the simulated device. While the same requests decode, a step costs only a
few comparisons and no walk over a list.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import compress
from operator import not_
from typing import NamedTuple
from zlib import crc32

from kvtune.plugin.vllm.types import ScheduledStep, SchedulerOutput


class Work(NamedTuple):
    """The tokens of one step. `context_tokens`: KV tokens attended to; `prefill_context_tokens`: those of prefills."""

    scheduled: int
    requests: int
    prefill: int
    context_tokens: int
    prefill_context_tokens: int


class WorkFollower:
    """Follows the steps of one engine; `follow` takes each once, in the order in which they were scheduled."""

    def __init__(self) -> None:
        self._steady: tuple[int, str | None, str | None] = (0, None, None)
        self._context = self._prefill_context = 0
        self._preempted: set[str] = set()  # preempted requests with output, which prefill again

    def follow(self, output: SchedulerOutput) -> Work:
        total, requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        cached = output.scheduled_cached_reqs
        ids = cached.req_ids
        if (
            total == requests == len(ids) == self._steady[0]
            and not output.scheduled_new_reqs
            and not output.finished_req_ids
            and not output.preempted_req_ids
            and not cached.resumed_req_ids
            and (ids[0], ids[-1]) == self._steady[1:]
        ):
            self._context += total
            return Work(total, requests, 0, self._context, self._prefill_context)
        computed, produced = cached.num_computed_tokens, cached.num_output_tokens
        context, prefill_context = sum(computed), 0
        # A running request with output decodes; everything else in the step is prefill.
        prefills = produced.count(0)
        decodes = len(ids) - prefills
        if prefills:
            prefill_context = sum(compress(computed, map(not_, produced)))
        if output.preempted_req_ids:
            self._preempted |= output.preempted_req_ids
        if self._preempted:
            again = self._prefilling_again(output)
            decodes -= len(again)
            prefill_context += sum(again)
        for new in output.scheduled_new_reqs:
            prefill_context += new.num_computed_tokens
            context += new.num_computed_tokens
        self._context, self._prefill_context = context, prefill_context
        steady = total == decodes == requests
        self._steady = (total, ids[0], ids[-1]) if steady and ids else (0, None, None)
        return Work(total, requests, max(0, total - decodes), context, prefill_context)

    def _prefilling_again(self, output: SchedulerOutput) -> list[int]:
        """Return the computed tokens of each preempted request that this step still prefills again."""
        cached, scheduled = output.scheduled_cached_reqs, output.num_scheduled_tokens
        self._preempted -= output.finished_req_ids
        prefilling: list[int] = []
        for name, computed, produced in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            # A request without output counts as prefill anyway.
            if name not in self._preempted or not produced:
                continue
            if scheduled[name] == 1 or name in output.scheduled_spec_decode_tokens:
                self._preempted.discard(name)
            else:
                prefilling.append(computed)
        return prefilling


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
