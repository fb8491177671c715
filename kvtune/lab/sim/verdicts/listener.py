"""Watches a scheduler's prefix-cache lookups and makes a verdict on each new request: how far each cache could hit.

Runs in processes that have vLLM (a simulator process, a test). `attach` wraps methods of one scheduler's objects, so
the listener works with stock's pool and managers and with the kvtune core's. It changes no decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtune.lab.sim.verdicts.causes import Boundaries
from kvtune.lab.sim.verdicts.groups import LookupGroup, drafters_groups, hit_alignment, lookup_groups
from kvtune.lab.sim.verdicts.tier import TierMemory
from kvtune.plugin.vllm.names import dropping_groups, hash_lookahead
from kvtune.plugin.vllm.patches import in_place_of
from kvtune.plugin.vllm.types import (
    BlockMap,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheManager,
    LookupPool,
    Request,
    Scheduler,
    has_tier,
)
from kvtune.requests.loads.prefix_tree import PrefixTree
from kvtune.requests.types import Span

Found = tuple[KVCacheBlocks, int, int]
"""What `get_computed_blocks` returns."""
OVERWRITTEN = "overwritten"  # the request that held the block wrote over it


class Fate(NamedTuple):
    """How a cached block was lost: when (virtual seconds), to which request, and in which phase of that request."""

    at_s: float
    by: str
    phase: str  # prefill, decode, overwritten
    for_draft: bool = False  # the block went to the draft model's own KV cache group


@dataclass(frozen=True, slots=True)
class PromptVerdict:
    """The verdict on one request's lookup: boundaries, and the KV cache group that caused each loss ("": no loss)."""

    request_id: str
    at_s: float
    boundaries: Boundaries
    lagging: str  # the group with the shortest hit
    unkept: str  # the group with the shortest hit in a pool that never evicts
    evicted: Fate | None


class LookupListener:
    """Remembers everything that one scheduler's cache has held, and makes a verdict on each new request.

    `spans_of`: returns the spans (prompt and answer) of a request id. `now_s`: returns the time in (virtual) seconds.
    """

    def __init__(self, spans_of: Callable[[str], Sequence[Span]], now_s: Callable[[], float]) -> None:
        self.spans_of = spans_of
        self.now_s = now_s
        self.verdicts: dict[str, PromptVerdict] = {}
        self.seen = PrefixTree()
        self._fates: dict[bytes, Fate | None] = {}  # every key ever cached; None while it is cached
        self._allocating: tuple[str, str] = ("", "")  # the request that is getting blocks, and its phase
        self._last_fate: Fate | None = None
        self._caching = False
        self._for_draft = False  # blocks are being given to the draft model's own group

    def attach(self, scheduler: Scheduler) -> None:
        manager = scheduler.kv_cache_manager
        self._manager = manager
        self._coordinator = manager.coordinator
        self._pool = manager.block_pool
        self._ahead = hash_lookahead(scheduler)
        drafts = drafters_groups(scheduler)
        self._groups = lookup_groups(self._coordinator, drafts)
        self._target = [group for group in self._groups if not group.draft] or self._groups
        self._alignment = hit_alignment(self._coordinator)
        self._tier: TierMemory | None = None
        if has_tier(scheduler.connector):
            self._tier = TierMemory(scheduler.connector.connector_scheduler)
            self._tier.watch_lookups(self._tier_looked_up)
        self._wrap_lookup(manager)
        self._wrap_allocation(manager)
        self._wrap_end(manager)
        self._set_while("_caching", self._coordinator, "cache_blocks")
        self._wrap_map(self._pool.cached_block_hash_to_block)
        self._wrap_steady_path(scheduler)
        for number in drafts:
            group = self._coordinator.single_type_managers[number]
            self._set_while("_for_draft", group, "allocate_new_blocks")

    def _set_while(self, flag: str, owner: object, name: str) -> None:
        """Let an attribute be true while this method runs."""

        @in_place_of(owner, name)
        def marked(method: Callable[..., object], *args: object, **options: object) -> object:
            setattr(self, flag, True)
            try:
                return method(*args, **options)
            finally:
                setattr(self, flag, False)

    def _wrap_lookup(self, manager: KVCacheManager) -> None:
        @in_place_of(manager, "get_computed_blocks")
        def looked_up(look_up: Callable[..., Found], request: Request, *limit: int | None) -> Found:
            lookup = look_up(request, *limit)
            if request.num_preemptions == 0 and request.num_output_tokens == 0:
                if self._tier is None:
                    self.verdicts[request.request_id] = self._judge(request, lookup[1])
                else:
                    self._looked_up = (request, lookup[1])
            return lookup

    def _tier_looked_up(self, request_id: str, computed: int, more: int) -> None:
        """Make the verdict when the tier has answered. `more`: tokens that the tier adds to the pool's `computed`."""
        request, local = self._looked_up
        if (
            request.request_id == request_id
            and request.num_preemptions == 0
            and not request.num_output_tokens
        ):
            self.verdicts[request_id] = self._judge(request, max(local, computed + more), local)

    def _wrap_allocation(self, manager: KVCacheManager) -> None:
        @in_place_of(manager, "allocate_slots")
        def allocated(
            allocate: Callable[..., KVCacheBlocks | None],
            request: Request,
            num_new_tokens: int,
            num_new_computed_tokens: int = 0,
            *args: object,
            **options: object,
        ) -> KVCacheBlocks | None:
            done, prompt = request.num_computed_tokens, request.num_prompt_tokens
            self._allocating = (request.request_id, "prefill" if done < prompt else "decode")
            blocks = allocate(request, num_new_tokens, num_new_computed_tokens, *args, **options)
            if blocks is not None and done < prompt:
                upto = min(done + num_new_computed_tokens + num_new_tokens, prompt)
                self.seen.insert(self.spans_of(request.request_id), upto)
            return blocks

    def _wrap_steady_path(self, scheduler: Scheduler) -> None:
        """Wrap the core's steady-decode path, which allocates blocks without calling `allocate_slots`."""
        from kvtune.plugin.core.steps.schedule import SteadyDecode

        if not isinstance(scheduler, SteadyDecode):
            return

        @in_place_of(scheduler, "steady_allocate")
        def allocated(allocate: Callable[[Request], object], request: Request) -> object:
            self._allocating = (request.request_id, "decode")
            return allocate(request)

        def place_row(i: int) -> object:
            self._allocating = (scheduler.columns.names[i], "decode")
            return type(scheduler).place_row(scheduler, i)

        scheduler.place_row = place_row  # of rows that stand in columns (lab/sim/fast/scheduler.py)

    def _wrap_end(self, manager: KVCacheManager) -> None:
        # With async scheduling a request's blocks are popped now and freed later.
        @in_place_of(manager, "free")
        @in_place_of(manager, "pop_blocks_for_free")
        def ended(end: Callable[[Request], object], request: Request) -> object:
            # The last token of an answer is never computed, as no later step needs it.
            self.seen.insert(self.spans_of(request.request_id), request.num_computed_tokens)
            return end(request)

    def _wrap_map(self, cached: BlockMap) -> None:
        fates = self._fates

        @in_place_of(cached, "insert")
        def inserted(insert: Callable[[bytes, KVCacheBlock], None], key: bytes, block: KVCacheBlock) -> None:
            insert(key, block)
            fates[key] = None

        @in_place_of(cached, "pop")
        def popped(
            pop: Callable[[bytes, int], KVCacheBlock | None], key: bytes, block_id: int
        ) -> KVCacheBlock | None:
            block = pop(key, block_id)
            if block is not None and cached.get_one_block(key) is None:
                request_id, phase = self._allocating
                fate = Fate(
                    self.now_s(), request_id, OVERWRITTEN if self._caching else phase, self._for_draft
                )
                if fate != self._last_fate:  # blocks lost together share one Fate, as millions may be lost
                    self._last_fate = fate
                fates[key] = self._last_fate
            return block

    def _judge(self, request: Request, hit: int, local: int = 0) -> PromptVerdict:
        """Find the causes of one lookup's misses. `local`: the tokens of `hit` that the pool had, without the tier."""
        prompt = request.num_tokens
        seen = max(self.seen.match(self.spans_of(request.request_id), prompt), hit)
        unit = self._alignment
        undropped = reachable = min(seen, prompt - 1) // unit * unit
        if self._ahead:
            # A block's hash also covers tokens after the block: it can be found only if these were seen, too.
            reachable = min(reachable, max(seen - self._ahead, 0) // unit * unit)
        if dropping_groups(self._coordinator):
            # EAGLE drops the last matching block; with several groups, vLLM looks up one block more.
            matched = reachable if len(self._groups) == 1 else seen // unit * unit
            reachable = max(min(reachable, matched - unit), 0)
        if not self._manager.prefix_cache_lookup_enabled(request):
            boundaries = Boundaries(
                prompt, hit, hit, hit, reachable, seen // unit * unit, seen, skipped=True, undropped=undropped
            )
            return PromptVerdict(request.request_id, self.now_s(), boundaries, "", "", None)
        now = [(self._reach(group, self._pool, request, reachable), group) for group in self._target]
        history = _History(self._pool, self._fates)
        kept = [(self._reach(group, history, request, reachable), group) for group in self._target]
        ever = self._together(history, request, reachable)
        # The hit if the draft model's own groups did not count.
        apart = len(self._target) < len(self._groups)
        target = self._together(self._pool, request, reachable) if apart else hit
        alone, laggard = min(now, key=lambda entry: entry[0])
        least, unkept = min(kept, key=lambda entry: entry[0])
        fate = self._lost(laggard, request, ever) if ever > max(alone, hit) else None
        lagging, tier_cause = laggard.label, ""
        if self._tier is not None and ever > hit:
            tier_cause, lacking = self._tier.cause(self._target, request.block_hashes, local, ever)
            lagging = lacking or lagging
        boundaries = Boundaries(
            prompt,
            hit,
            alone,
            ever,
            reachable,
            seen // unit * unit,
            seen,
            target=target,
            undropped=undropped,
            evicted_for_draft=fate is not None and fate.for_draft,
            tier_cause=tier_cause,
        )
        return PromptVerdict(
            request.request_id,
            self.now_s(),
            boundaries,
            lagging if hit < reachable else "",
            unkept.label if least < reachable else "",
            fate,
        )

    def _reach(
        self, group: LookupGroup, pool: LookupPool, request: Request, limit: int, drop: bool = True
    ) -> int:
        """Return the hit of vLLM's lookup in `pool` for `group` alone, at most `limit` tokens."""
        drop = drop and group.use_eagle
        length = min(
            limit + (group.block_tokens if drop else 0), len(request.block_hashes) * pool.hash_block_size
        )
        lookup = group.manager_class.find_longest_cache_hit(
            block_hashes=request.block_hashes,
            max_length=length,
            kv_cache_group_ids=group.ids,
            block_pool=pool,
            kv_cache_spec=group.spec,
            drop_eagle_block=drop,
            alignment_tokens=self._alignment,
            dcp_world_size=group.dcp,
            pcp_world_size=group.pcp,
        )
        return min(int(lookup[1]), limit)

    def _together(self, pool: LookupPool, request: Request, limit: int) -> int:
        """Return the longest hit, at most `limit` tokens, that all of the model's own groups have in `pool`."""
        first = True
        while True:
            length = limit
            for group in self._target:
                length = self._reach(group, pool, request, length, drop=first)
            if length == limit:
                return length
            limit, first = length, False

    def _lost(self, group: LookupGroup, request: Request, boundary: int) -> Fate | None:
        """Return the fate of the first evicted block that `group` needs for a hit up to `boundary`, or None."""
        unit = self._pool.hash_block_size
        for end in group.needed_ends(boundary):
            for group_id in group.ids:
                key = _key(request.block_hashes[end // unit - 1], group_id)
                fate = self._fates.get(key)
                if fate is not None:
                    return fate
        return None


class _History:
    """A pool that holds every block that was ever cached, for vLLM's lookups only; it cannot allocate."""

    def __init__(self, pool: LookupPool, fates: Mapping[bytes, Fate | None]) -> None:
        self.hash_block_size = pool.hash_block_size
        self.null_block = pool.null_block
        self._fates = fates

    def get_cached_block(self, block_hash: bytes, kv_cache_group_ids: list[int]) -> list[KVCacheBlock] | None:
        if all(_key(block_hash, group_id) in self._fates for group_id in kv_cache_group_ids):
            return [self.null_block] * len(kv_cache_group_ids)
        return None


def _key(block_hash: bytes, group_id: int) -> bytes:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    key: bytes = make_block_hash_with_group_id(block_hash, group_id)
    return key
