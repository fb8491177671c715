"""What idle conversations keep in vLLM's cache, measured with its own scheduler. In a simulator, and in doctor's child.

A conversation is one prompt with a short answer. It is sent to an engine without a model, alone, and then again. What
it takes and leaves is counted in blocks; how many of them a pool keeps follows (`kvtune/data/layout/idle.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtune.data.layout.idle import Footprint, Idle, conversations_kept
from kvtune.lab.sim.engine_types import EngineCore
from kvtune.plugin.vllm.names import hash_lookahead
from kvtune.plugin.vllm.types import KVCacheBlock
from kvtune.requests.types import Request, Span

LENGTHS = (4_096, 32_768, 131_072)
"""Tokens of the conversations: a short prompt, a document, an agent's context."""
ANSWER_TOKENS = 2
PATIENCE = 200
"""Steps without progress after which a request is taken to be stuck. One that waits for a tier gets on sooner."""
FINEST = 3
"""Blocks that a hit may need although it does not hold them: of a drafter, the one that is computed again."""


@dataclass(slots=True)
class Sent:
    """One request, after it ended. `kept`: the blocks with hashes that the conversation left, the next to be evicted
    first. `held`: those of the blocks of before that it had after its first step. `most`: blocks taken at once."""

    hit_tokens: int
    most: int
    kept: list[KVCacheBlock]
    held: set[int]


class Conversation:
    """Sends one prompt again and again to an engine, and counts its blocks. `watched` counts until it is undone."""

    def __init__(self, engine: EngineCore, prompt_tokens: int) -> None:
        from kvtune.lab.sim.requests import Factory

        self._engine = engine
        self._pool: Any = engine.scheduler.kv_cache_manager.block_pool
        prompt = (Span(0, 0, prompt_tokens),)
        requests = [Request(str(number), prompt, ANSWER_TOKENS) for number in range(2 + 2 * FINEST)]
        ahead = hash_lookahead(engine.scheduler)
        self._factory = Factory(requests, self._pool.hash_block_size, caching=True, ahead=ahead)
        self._taken: dict[int, KVCacheBlock] = {}
        self._sent = self._most = 0

    def watched(self) -> Callable[[], None]:
        """Count from now on what the pool gives out; the result ends that."""
        give = self._pool.get_new_blocks

        def counted(*args: Any, **options: Any) -> list[KVCacheBlock]:
            blocks: list[KVCacheBlock] = give(*args, **options)
            self._taken.update((block.block_id, block) for block in blocks)
            used = [b for b in self._taken.values() if b.ref_cnt > 0 or b.block_hash is not None]
            self._most = max(self._most, len(used))
            return blocks

        self._pool.get_new_blocks = counted
        return lambda: delattr(self._pool, "get_new_blocks")

    def forget(self) -> None:
        self._engine.reset_prefix_cache()
        self._taken.clear()

    def evict(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._pool.evict_blocks({block.block_id for block in blocks})

    def send(self) -> Sent:
        scheduler: Any = self._engine.scheduler
        request = self._factory.make(self._sent, 0.0)
        self._sent += 1
        statistics = request.prefill_stats  # filled in at admission, and then removed from the request
        assert statistics is not None
        before = [block for block in self._taken.values() if block.block_hash is not None]
        self._most = 0
        scheduler.add_request(request)
        self._engine.step_fn()
        held = {block.block_id for block in before if block.ref_cnt}
        finished(self._engine, request)
        free = self._pool.free_block_queue.get_all_free_blocks()
        kept = [b for b in free if b.block_hash is not None and b.block_id in self._taken]
        return Sent(int(statistics.num_cached_tokens), self._most, kept, held)


def finished(engine: EngineCore, request: Any) -> bool:
    """Step until the only request has ended. False if it never will: the pool is too small, and it is taken back."""
    scheduler: Any = engine.scheduler
    if request.request_id not in scheduler.requests and not request.num_computed_tokens:
        scheduler.add_request(request)
    waited = 0
    while scheduler.has_requests():
        before = request.num_computed_tokens
        engine.step_fn()
        waited = 0 if scheduler.running and request.num_computed_tokens > before else waited + 1
        if request.num_preemptions or waited > PATIENCE:
            from vllm.v1.request import RequestStatus

            scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            while scheduler.has_requests():
                engine.step_fn()
            return False
    return True


def runs(engine: EngineCore, prompt_tokens: int) -> bool:
    """Whether the engine runs a request with a prompt of this length alone. The cache is empty afterwards."""
    from kvtune.lab.sim.requests import Factory

    block = engine.scheduler.kv_cache_manager.block_pool.hash_block_size
    prompt = [Request("runs", (Span(0, 0, prompt_tokens),), ANSWER_TOKENS)]
    factory = Factory(prompt, block, caching=True, ahead=hash_lookahead(engine.scheduler))
    engine.reset_prefix_cache()
    done = finished(engine, factory.make(0, 0.0))
    engine.reset_prefix_cache()
    return done


def idle_of(
    engine: EngineCore, longest: int, *, pool_known: bool, lengths: Sequence[int] = LENGTHS
) -> list[Idle]:
    """Return what conversations of each length keep, and how many this engine's pool keeps if its size is known.

    `longest`: max_model_len. Longer conversations are left out. The cache is empty afterwards.
    """
    scheduler: Any = engine.scheduler
    groups = len(scheduler.kv_cache_config.kv_cache_groups)
    usable = scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1  # one block is vLLM's null block
    answers = []
    for tokens in lengths:
        prompt = min(tokens, longest - ANSWER_TOKENS)
        if tokens > longest or prompt < 1 or not runs(engine, prompt):
            continue
        conversation = Conversation(engine, prompt)
        stop = conversation.watched()
        try:
            hit, of_group, footprint = _measured(conversation, groups)
        finally:
            stop()
            engine.reset_prefix_cache()
        number = conversations_kept(footprint, usable) if hit else 0
        answers.append(
            Idle(
                prompt_tokens=prompt,
                hit_tokens=hit,
                blocks=of_group,
                running_blocks=footprint.most,
                conversations=number if pool_known else None,
            )
        )
    return answers


def _measured(conversation: Conversation, groups: int) -> tuple[int, list[int], Footprint]:
    from vllm.v1.core.kv_cache_utils import get_group_id

    conversation.forget()
    first = conversation.send()
    counts = Counter(get_group_id(block.block_hash) for block in first.kept)
    again = conversation.send()
    footprint = Footprint(
        kept=len(first.kept),
        spare=_spare(conversation, first, again),
        most=first.most,
        again_most=again.most,
        again_kept=len(again.kept),
    )
    return again.hit_tokens, [counts[group] for group in range(groups)], footprint


def _spare(conversation: Conversation, first: Sent, again: Sent) -> int:
    """Return how many of a conversation's blocks may be evicted, in the queue's order, and it still hits as much."""
    spare = 0
    for block in first.kept:
        if block.block_id in again.held:
            break
        spare += 1
    for number in range(spare, max(0, spare - FINEST), -1):
        conversation.forget()
        kept = conversation.send().kept
        conversation.evict(kept[:number])
        if conversation.send().hit_tokens == again.hit_tokens:
            return number
    return 0
