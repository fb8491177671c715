"""Listens to a scheduler's prefix-cache lookups and says of each new request what every cache could have given it.

Runs where vLLM runs (a sim worker, a test). `attach` wraps methods of one scheduler's own objects, so it hears
whichever pool and managers are in force, stock or kvtune; nothing is changed in what they decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtune.sim.verdicts.causes import Boundaries
from kvtune.workload.prefix_tree import PrefixTree
from kvtune.workload.types import Span

OVERWRITTEN = "overwritten"  # not taken by another request: its own grew over it


class Fate(NamedTuple):
    """How a cached block was lost: when (seconds), to which request, in which of its phases."""

    at_s: float
    by: str
    phase: str  # prefill, decode, overwritten


@dataclass(frozen=True, slots=True)
class PromptVerdict:
    """One request's admission: its boundaries, and who is to blame for each kind of loss ("" for nobody)."""

    request_id: str
    at_s: float
    boundaries: Boundaries
    lagging: str  # the group that holds least now
    unkept: str  # the group that kept least ever
    evicted: Fate | None


class LookupListener:
    """What one scheduler's cache ever held, and a verdict on each request that it admits.

    `spans_of` gives the tokens of a request by its id, prompt and answer; `now_s` the (virtual) time.
    """

    def __init__(self, spans_of: Callable[[str], Sequence[Span]], now_s: Callable[[], float]) -> None:
        self.spans_of = spans_of
        self.now_s = now_s
        self.verdicts: dict[str, PromptVerdict] = {}
        self.seen = PrefixTree()
        self._fates: dict[Any, Fate | None] = {}  # every key ever cached; None while it is cached
        self._busy: tuple[str, str] = ("", "")
        self._last: Fate | None = None
        self._caching = False

    def attach(self, scheduler: Any) -> None:
        """Listen to `scheduler` (vLLM's Scheduler or a subclass) from now on."""
        manager = scheduler.kv_cache_manager
        self._manager = manager
        self._coordinator = manager.coordinator
        self._pool = manager.block_pool
        self._groups = _spec_groups(self._coordinator)
        self._alignment = _alignment(self._coordinator)
        self._wrap_lookup(manager)
        self._wrap_allocation(manager)
        self._wrap_end(manager)
        self._wrap_caching(self._coordinator)
        self._wrap_map(self._pool.cached_block_hash_to_block)
        self._wrap_steady(scheduler)

    def _wrap_lookup(self, manager: Any) -> None:
        original = manager.get_computed_blocks

        def get_computed_blocks(request: Any) -> Any:
            found = original(request)
            if request.num_preemptions == 0 and request.num_output_tokens == 0:
                self.verdicts[request.request_id] = self._judge(request, found[1])
            return found

        manager.get_computed_blocks = get_computed_blocks

    def _wrap_allocation(self, manager: Any) -> None:
        original = manager.allocate_slots

        def allocate_slots(
            request: Any, num_new_tokens: int, num_new_computed_tokens: int = 0, *args: Any, **kwargs: Any
        ) -> Any:
            done, prompt = request.num_computed_tokens, request.num_prompt_tokens
            self._busy = (request.request_id, "prefill" if done < prompt else "decode")
            blocks = original(request, num_new_tokens, num_new_computed_tokens, *args, **kwargs)
            if blocks is not None and done < prompt:
                upto = min(done + num_new_computed_tokens + num_new_tokens, prompt)
                self.seen.insert(self.spans_of(request.request_id), upto)
            return blocks

        manager.allocate_slots = allocate_slots

    def _wrap_steady(self, scheduler: Any) -> None:
        """The steady-decode path asks for blocks without `allocate_slots`."""
        original = getattr(scheduler, "_allocate", None)
        if original is None:
            return

        def allocate(request: Any) -> Any:
            self._busy = (request.request_id, "decode")
            return original(request)

        scheduler.steady_allocate = allocate

    def _wrap_end(self, manager: Any) -> None:
        # With async scheduling a request's blocks are popped now and freed later.
        for name in ("free", "pop_blocks_for_free"):
            original = getattr(manager, name)

            def end(request: Any, original: Callable[[Any], Any] = original) -> Any:
                # The last token of an answer is never computed: nothing was generated from it.
                self.seen.insert(self.spans_of(request.request_id), request.num_computed_tokens)
                return original(request)

            setattr(manager, name, end)

    def _wrap_caching(self, coordinator: Any) -> None:
        original = coordinator.cache_blocks

        def cache_blocks(request: Any, num_computed_tokens: int) -> Any:
            self._caching = True
            try:
                return original(request, num_computed_tokens)
            finally:
                self._caching = False

        coordinator.cache_blocks = cache_blocks

    def _wrap_map(self, cached: Any) -> None:
        insert, pop = cached.insert, cached.pop
        fates = self._fates

        def listening_insert(key: Any, block: Any) -> None:
            insert(key, block)
            fates[key] = None

        def listening_pop(key: Any, block_id: int) -> Any:
            block = pop(key, block_id)
            if block is not None and cached.get_one_block(key) is None:
                by, phase = self._busy
                fate = Fate(self.now_s(), by, OVERWRITTEN if self._caching else phase)
                if fate != self._last:  # blocks that go together share one: an hour's trace loses millions
                    self._last = fate
                fates[key] = self._last
            return block

        cached.insert, cached.pop = listening_insert, listening_pop

    def _judge(self, request: Any, hit: int) -> PromptVerdict:
        prompt = request.num_tokens
        seen = max(self.seen.match(self.spans_of(request.request_id), prompt), hit)
        unit = self._alignment
        reachable = min(seen, prompt - 1) // unit * unit
        if self._coordinator.eagle_group_ids:
            # The last block that matches is dropped; several groups are asked for one block more than they may serve.
            matched = reachable if len(self._groups) == 1 else seen // unit * unit
            reachable = max(min(reachable, matched - unit), 0)
        if not self._manager.prefix_cache_lookup_enabled(request):
            at = Boundaries(prompt, hit, hit, hit, reachable, seen // unit * unit, seen, skipped=True)
            return PromptVerdict(request.request_id, self.now_s(), at, "", "", None)
        now = [(self._reach(group, self._pool, request, reachable), group) for group in self._groups]
        history = _History(self._pool, self._fates)
        kept = [(self._reach(group, history, request, reachable), group) for group in self._groups]
        ever = self._together(history, request, reachable)
        alone, laggard = min(now, key=lambda entry: entry[0])
        least, unkept = min(kept, key=lambda entry: entry[0])
        at = Boundaries(prompt, hit, alone, ever, reachable, seen // unit * unit, seen)
        fate = self._lost(laggard, request, ever) if ever > max(alone, hit) else None
        return PromptVerdict(
            request.request_id,
            self.now_s(),
            at,
            laggard.label if hit < reachable else "",
            unkept.label if least < reachable else "",
            fate,
        )

    def _reach(self, group: _Group, pool: Any, request: Any, limit: int, drop: bool = True) -> int:
        """How far `group` alone could serve this request from `pool`, by vLLM's own lookup, within `limit`."""
        drop = drop and group.use_eagle
        length = min(
            limit + (group.block_tokens if drop else 0), len(request.block_hashes) * pool.hash_block_size
        )
        found = group.manager_class.find_longest_cache_hit(
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
        return min(int(found[1]), limit)

    def _together(self, pool: Any, request: Any, limit: int) -> int:
        """The longest boundary within `limit` that all groups could serve from `pool`."""
        first = True
        while True:
            length = limit
            for group in self._groups:
                length = self._reach(group, pool, request, length, drop=first)
            if length == limit:
                return length
            limit, first = length, False

    def _lost(self, group: _Group, request: Any, boundary: int) -> Fate | None:
        """The first block that `group` would need for `boundary`, once held and does not hold any more."""
        unit = self._pool.hash_block_size
        for end in group.needed_ends(boundary):
            for group_id in group.ids:
                key = _key(request.block_hashes[end // unit - 1], group_id)
                fate = self._fates.get(key)
                if fate is not None:
                    return fate
        return None


@dataclass(frozen=True, slots=True)
class _Group:
    """KV cache groups of one spec, looked up together."""

    label: str
    spec: Any
    ids: list[int]
    manager_class: Any
    use_eagle: bool
    block_tokens: int
    dcp: int
    pcp: int

    def needed_ends(self, boundary: int) -> Sequence[int]:
        """The ends of the blocks that a hit at `boundary` needs, first one first."""
        from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

        size = self.block_tokens
        first = size
        if isinstance(self.spec, MambaSpec):
            return range(boundary, boundary + 1)
        if isinstance(self.spec, SlidingWindowSpec):
            first = max(boundary - (self.spec.sliding_window - 2) // size * size, size)
        whole = range(first, boundary + 1, size)
        # With a match unit finer than a block, a hit may end inside one, under a hash of its own.
        return whole if boundary % size == 0 else [*whole, boundary]


class _History:
    """A pool that never evicts: holds whatever was cached once. Answers vLLM's lookups, hands out no block."""

    def __init__(self, pool: Any, fates: Mapping[Any, Fate | None]) -> None:
        self.hash_block_size = pool.hash_block_size
        self.null_block = pool.null_block
        self._fates = fates

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> list[Any] | None:
        if all(_key(block_hash, group_id) in self._fates for group_id in kv_cache_group_ids):
            return [self.null_block] * len(kv_cache_group_ids)
        return None


def _key(block_hash: Any, group_id: int) -> Any:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    return make_block_hash_with_group_id(block_hash, group_id)


def _alignment(coordinator: Any) -> int:
    """Tokens on whose multiples this coordinator's hits land."""
    found = getattr(coordinator, "_cache_hit_alignment_tokens", None)
    return int(found if found is not None else coordinator.scheduler_block_size)


def _spec_groups(coordinator: Any) -> list[_Group]:
    managers = coordinator.single_type_managers
    found = getattr(coordinator, "attention_groups", None)
    if found is None:
        cacheable = [i for i, m in enumerate(managers) if m.kv_cache_spec.prefix_cacheable]
        found = [
            (managers[i].kv_cache_spec, [i], type(managers[i]), i in coordinator.eagle_group_ids)
            for i in cacheable
        ]
    groups = []
    for spec, ids, manager_class, use_eagle in found:
        manager = managers[ids[0]]
        groups.append(
            _Group(
                group_label(spec),
                spec,
                list(ids),
                manager_class,
                bool(use_eagle),
                manager.block_size,
                manager.dcp_world_size,
                manager.pcp_world_size,
            )
        )
    return groups


def group_label(spec: Any) -> str:
    """A KV cache group's kind in words for a person."""
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    kind = str(get_kv_cache_spec_kind(spec).value)
    if kind == "mamba":
        return "state"
    window = getattr(spec, "sliding_window", None)
    return f"{kind.replace('_', ' ')}{f' {window}' if window and kind.startswith('sliding') else ''}"
