"""Which sliding-window blocks are kept for later prompts, and why. Runs in EngineCore.

A prompt can resume at a boundary only if every window group still has the `need` blocks before that boundary. Stock
keeps the window at a prompt's end and, once a second prompt shares a prefix, the window at the end of that prefix.
This manager also keeps

    |--prompt------------------------------------------------------|--output--|
            [spec]          [spec]      [spec][...slack...][window]   [output]
    ends at the last multiple of 4*slack, 2*slack, slack

so that the second prompt with a shared prefix can resume there (in stock: the third). A block's grade tells the pool's
policy why the block is kept. If a prompt resumes in such a window, the blocks of the window that stock would keep after
this prompt become ordinary. Policy `pin` (a published one) instead keeps the window at the end of each prefill chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager, SlidingWindowManager
from vllm.v1.request import Request

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core.breaker import Breaker
from kvtune.plugin.core.cache.pool import PolicyPool
from kvtune.plugin.core.policies import FAR, NEAR, OUTPUT, SPECULATIVE, WINDOW

Span = tuple[int, int, int]
"""First block, block after the last one, grade."""


class Ends(NamedTuple):
    """Where stock keeps windows: at these boundaries (the first `own` are the prompt's), and at an interval if any."""

    boundaries: list[int]
    own: int
    interval: int | None


SPECS = ("SlidingWindowSpec", "SlidingWindowMLASpec")
"""vLLM's specs of sliding windows whose rules are known here; groups with others stay as vLLM built them."""


class KeepingGroup(SingleTypeKVCacheManager):  # type: ignore[misc]
    """A manager of a group that decides itself which blocks get a hash. It adds no reference to a block.

    No method uses `super`: after an error in a method that it calls, its class is `stock`, vLLM's own.
    """

    stock: ClassVar[type[SingleTypeKVCacheManager]]
    block_pool: PolicyPool
    breaker: Breaker
    resumed: set[str]
    """Requests that resumed in kept blocks whose grades were not adjusted yet."""

    def stand_down(self) -> None:
        """Become vLLM's own manager, for good."""
        self.__class__ = self.stock

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *tokens: int
    ) -> None:
        self.stock.add_local_computed_blocks(self, request_id, new_computed_blocks, *tokens)
        if new_computed_blocks and not self.breaker.tripped:
            self.breaker.attempt(self._resumes, request_id)

    def _resumes(self, request_id: str) -> None:
        if self.block_pool.extras_first:
            self.resumed.add(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self.resumed.discard(request_id)
        blocks: list[KVCacheBlock] = self.stock.pop_blocks_for_free(self, request_id)
        return blocks


class KeepingWindowManager(KeepingGroup, SlidingWindowManager):  # type: ignore[misc]
    """vLLM's SlidingWindowManager, which keeps the windows that the module's docstring draws."""

    stock = SlidingWindowManager
    settings: CoreSettings

    def adopt_window(self, settings: CoreSettings, breaker: Breaker) -> None:
        """Set the attributes of a manager that vLLM has built. Called once."""
        self.settings = settings
        self.breaker = breaker
        self.need = self._contiguous_blocks_for_hit(self.sliding_window, self.block_size, self.use_eagle)
        self.keep = max(self.need, -(-settings.pin_window // self.block_size))
        # EAGLE reads one block beyond the boundary.
        self.shift = 1 if self.use_eagle else 0
        self.slack_blocks = -(-settings.slack // self.block_size)
        self.aligned = self.cache_hit_alignment_tokens == self.block_size
        self.resumed = set()

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        *,
        replay_boundaries: Sequence[int],
    ) -> None:
        cached = self.num_cached_block.get(request.request_id)
        try:
            ends = Ends([*replay_boundaries], len(replay_boundaries), retention_interval)
            self._cache_graded(request, num_tokens, ends)
        except Exception as error:
            KeepingWindowManager._uncache(self, request.request_id, cached)
            self.breaker.trip(error)
            SlidingWindowManager.cache_blocks(
                self,
                request,
                num_tokens,
                retention_interval=retention_interval,
                replay_boundaries=replay_boundaries,
            )

    def _uncache(self, request_id: str, cached: int | None) -> None:
        """Take back what `_cache_graded` did: the hashes of the blocks after the first `cached`, and the count."""
        start = cached or 0
        blocks = self.req_to_blocks.get(request_id, ())[start:]
        PolicyPool.forget_hashes(self.block_pool, blocks, start, self.block_size)
        self.num_cached_block.pop(request_id, None)
        if cached is not None:
            self.num_cached_block[request_id] = cached

    def _cache_graded(self, request: Request, num_tokens: int, ends: Ends) -> None:
        """Hash and grade the blocks to keep of those that are full and have no hash yet."""
        start = self.num_cached_block.get(request.request_id, 0)
        # A block's hash may depend on tokens after the block: the last full block then has no hash yet.
        hashed = len(request.block_hashes) * self.block_pool.hash_block_size
        end = min(num_tokens, hashed) // self.block_size
        resumed = request.request_id in self.resumed
        if start >= end and not resumed:
            return
        if ends.interval == 0 and start * self.block_size >= request.num_prompt_tokens + self.shift:
            # No window is kept during decode; `keep_output` keeps the last one when the request ends.
            self.num_cached_block[request.request_id] = end
            return
        if request.shared_prefix_boundary:
            ends.boundaries.append(request.shared_prefix_boundary)
            if self.use_eagle:
                # EAGLE reads one block past the boundary: a prompt that diverges there can resume only a block earlier.
                ends.boundaries.append(request.shared_prefix_boundary - self.block_size)
        blocks = self.req_to_blocks[request.request_id]
        if resumed:
            self.resumed.discard(request.request_id)
            self._take_over(blocks[:start], ends)
        if start >= end:
            return
        grades = self._grades(start, end, ends)
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=blocks,
            num_cached_blocks=start,
            num_full_blocks=end,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
            block_mask=[grade >= 0 for grade in grades],
        )
        self.block_pool.grade(blocks[start:end], grades)
        self.num_cached_block[request.request_id] = end

    def _take_over(self, cached: Sequence[KVCacheBlock], ends: Ends) -> None:
        """Set grade WINDOW for extras that are in the window just hit and that stock would keep after this prompt."""
        pool, end = self.block_pool, len(cached)
        start = max(0, end - self.need)
        window = cached[start:]
        if not any(map(pool.is_extra, window)):
            return
        goes_on = pool.is_output(window[-1])
        kept = self._mask(start, end, ends)
        pool.grade(window, [WINDOW if kept is None or keeps else -1 for keeps in kept or window])
        if goes_on:
            prompts = ends._replace(boundaries=ends.boundaries[: ends.own])
            own = self._mask(start, end, prompts) or [True] * len(window)
            pool.leave([block for block, is_own in zip(window, own, strict=True) if not is_own])

    def _grades(self, start: int, end: int, ends: Ends) -> list[int]:
        """Return the grade of each block from `start` to `end`; -1: not kept."""
        stock = self._mask(start, end, ends)
        if stock is None:
            grades = [SPECULATIVE] * (end - start)
        else:
            # What stock keeps gets the best grade.
            grades = [WINDOW if kept else -1 for kept in stock]
        # If hits can end only at every n-th block, most blocks of the slack are useless.
        usable = None if self.aligned else self._mask(start, end, ends._replace(interval=None))
        for first, last, grade in self._spans(start, end, ends):
            for i in range(max(first, start) - start, min(last, end) - start):
                if (grades[i] < 0 or grade < grades[i]) and (usable is None or usable[i]):
                    grades[i] = grade
        return grades

    def _mask(self, start: int, end: int, ends: Ends) -> list[bool] | None:
        """Return for each block from `start` to `end` whether stock would keep it; None if it keeps all of them."""
        kept: list[bool] | None = self.reachable_block_mask(
            start_block=start,
            end_block=end,
            alignment_tokens=self.cache_hit_alignment_tokens,
            kv_cache_spec=self.kv_cache_spec,
            use_eagle=self.use_eagle,
            retention_interval=ends.interval,
            reachable_boundaries=ends.boundaries,
            dcp_world_size=self.dcp_world_size,
        )
        return kept

    def _spans(self, start: int, end: int, kept: Ends) -> list[Span]:
        """Return the spans to keep of a prompt whose blocks from `start` to `end` are being computed."""
        ends = [self._end_block(boundary) for boundary in kept.boundaries]
        big = end - start >= self.settings.min_drop
        if self.settings.policy == "pin":
            spans = [(last - self.keep, last, WINDOW) for last in ends]
            return [*spans, (end - self.keep, end, SPECULATIVE)] if big else spans
        spans = [(last - self.keep, last, NEAR) for last in ends]
        last = max(ends[: kept.own])
        slack = self.slack_blocks
        spans.append((last - self.keep - slack, last, FAR))
        spans.append((last - self.keep - (slack + 3) // 4, last, NEAR))
        if big:
            # Multiples of the slack: prompts of any length that share a prefix keep the same windows.
            step = max(slack, 1)
            for _ in range(self.settings.windows):
                place = (last - slack) // step * step
                if place <= 0:
                    break
                spans.append((place - self.keep, place, SPECULATIVE))
                step *= 2
        return spans

    def _end_block(self, boundary: int) -> int:
        """Return the end (exclusive) of the blocks that a resume at this boundary (in tokens) needs."""
        aligned = boundary // self.cache_hit_alignment_tokens * self.cache_hit_alignment_tokens
        return int(aligned // self.block_size + self.shift)

    def keep_output(self, request: Request) -> None:
        """Hash the last window of a request that ends or is preempted, so that its continuation can resume there."""
        request_id = request.request_id
        blocks = self.req_to_blocks.get(request_id)
        cached = self.num_cached_block.get(request_id, 0)
        if not blocks or not cached:
            return
        # The last token has no KV yet: the next step would have written it.
        computed = min(request.num_computed_tokens, request.num_tokens - 1, cached * self.block_size)
        end = self._end_block(computed - self.shift * self.block_size)
        start = max(0, end - self.keep)
        window = blocks[start:end]
        if end > cached or not window or len(window) <= self.shift or any(block.is_null for block in window):
            return
        new = [block.block_hash is None for block in window]
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=blocks,
            num_cached_blocks=start,
            num_full_blocks=end,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
            block_mask=new,
        )
        self.block_pool.grade(window, [OUTPUT if is_new else -1 for is_new in new])


def supports(manager: SlidingWindowManager) -> str:
    """Return why this manager must stay stock's; empty if it can become a KeepingWindowManager.

    vLLM's manager asks its spec before it hashes a block. So does this: a spec that vLLM never hits has no hashes, and
    its blocks need not be a multiple of the tokens that a hash covers.
    """
    if type(manager) is not SlidingWindowManager:
        return f"{type(manager).__name__} is not a plain sliding-window group"
    spec = type(manager.kv_cache_spec).__name__
    if spec not in SPECS:
        return f"kvtune does not know windows of {spec}"
    if not (manager.enable_caching and manager.kv_cache_spec.prefix_cacheable):
        return f"vLLM caches no window of this {spec}"
    if manager.dcp_world_size > 1 or manager.pcp_world_size > 1:
        return "context parallelism"
    if manager.cache_hit_alignment_tokens % manager.block_size:
        return "hits end inside blocks"
    if manager.block_size % manager.block_pool.hash_block_size:
        return "a block is not a whole number of hashes"
    if manager.sliding_window < 2:
        return "a window of one token needs no block"
    return ""
