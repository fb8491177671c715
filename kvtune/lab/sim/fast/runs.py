"""Stock's block pool with the blocks of a prompt kept as runs: found, touched, freed and evicted together.

A run is what is cached of consecutive positions of one prompt in a group of full attention. All of its blocks have the
same requests; a run that is free is one entry of the free queue, from its last block to its first. Hashes and the map
of cached blocks are vLLM's own, block by block. What a run knows for its blocks is not in them: their `ref_cnt` is
`IN_RUN`, and they are in no queue.

| event | what happens to runs |
|---|---|
| blocks get their hash | they join the last run of their request, if no other request has it, or begin one |
| a prompt hits a part of a run | the run is split there |
| a request ends | its runs that no other has join, and become one entry at the queue's end |
| blocks are taken from the queue | a run loses its last blocks |

Whatever this module does not know (events, watchers, listeners, blocks touched one by one, other searches) ends the
runs for good: `dissolve` gives every block its count and place, and the pool is a `QuickPool`. Simulator's process
only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from kvtune.lab.sim.chains import BlockHashes
from kvtune.plugin.core.cache.quick import Filled, QuickPool

IN_RUN = -1
"""The reference count of a block whose run knows it."""

Holder = tuple[int, str]
"""A request in a KV cache group."""


class Run:
    """Blocks of consecutive positions from `first` on. `holders`: who has it; without any it is free.

    Its pool's loops take it for a block with a hash when it is freed.
    """

    __slots__ = ("blocks", "first", "holders", "next_free_block", "pool", "prev_free_block", "ref_cnt")
    is_null = False

    def __init__(self, pool: RunPool, first: int, blocks: list[KVCacheBlock], holders: set[Holder]) -> None:
        self.pool, self.first, self.blocks, self.holders = pool, first, blocks, holders
        self.prev_free_block: Any = None
        self.next_free_block: Any = None
        self.ref_cnt = 1
        pool.runs[self._block_hash] = self

    @property
    def _block_hash(self) -> bytes:
        return cast(bytes, self.blocks[0]._block_hash)

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    def common(self, keys: Sequence[bytes], most: int) -> int:
        """Return how many of the first `most` blocks have these keys. After one that differs, all do."""
        blocks, first = self.blocks, self.first
        most = min(most, len(blocks))
        if blocks[most - 1]._block_hash == keys[first + most - 1]:
            return most
        return bisect_left(range(most), True, key=lambda n: blocks[n]._block_hash != keys[first + n])

    def split(self, size: int) -> None:
        """Keep the first `size` blocks; the others become a run."""
        rest = Run(self.pool, self.first + size, self.blocks[size:], set(self.holders))
        del self.blocks[size:]
        for holder in self.holders:
            runs = self.pool.held[holder]
            runs.insert(runs.index(self) + 1, rest)
        if not self.holders:  # the rest is evicted first
            before = self.prev_free_block
            rest.prev_free_block, rest.next_free_block = before, self
            before.next_free_block = self.prev_free_block = rest


class Hit(list[KVCacheBlock]):
    """The cached blocks of a prompt in one group, and the runs that have them up to a position; others have none.

    Blocks may have been dropped at the end since. `holder`: whose blocks they become.
    """

    __slots__ = ("holder", "runs")

    def __init__(self, blocks: Iterable[KVCacheBlock] = (), runs: Iterable[tuple[Run, int]] = ()) -> None:
        super().__init__(blocks)
        self.runs = [*runs]
        self.holder: Holder | None = None

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        return Hit(part, self.runs) if isinstance(index, slice) and not index.start else part

    def pieces(self) -> Iterator[tuple[Run | None, int, int]]:
        """Yield each run with its positions, first and end, and the positions between runs, with None."""
        place, count = 0, len(self)
        for run, end in self.runs:
            if run.first >= count:
                break
            if place < run.first:
                yield None, place, run.first
            place = min(end, count)
            yield run, run.first, place
        if place < count:
            yield None, place, count

    def evictable(self) -> int:
        """Return how many of the blocks are free."""
        free = 0
        for run, first, end in self.pieces():
            if run is None:
                free += [block.ref_cnt for block in islice(self, first, end)].count(0)
            elif not run.holders:
                free += end - first
        return free


class RunQueue(FreeKVCacheBlockQueue):  # type: ignore[misc]
    """vLLM's queue of free blocks, in which a run may stand for its blocks."""

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        blocks: list[KVCacheBlock] = []
        head = self.fake_free_list_head
        node = head.next_free_block
        wanted = n
        while wanted:
            if type(node) is Run:
                taken = node.blocks[-wanted:]
                del node.blocks[-wanted:]
                for block in taken:
                    block.ref_cnt = 0
                taken.reverse()
                blocks += taken
                wanted -= len(taken)
                if node.blocks:
                    break
                del node.pool.runs[taken[-1]._block_hash]
            else:
                blocks.append(node)
                wanted -= 1
            after = node.next_free_block
            node.prev_free_block = node.next_free_block = None
            node = after
        head.next_free_block, node.prev_free_block = node, head
        self.num_free_blocks -= n
        return blocks

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        free: list[KVCacheBlock] = []
        node = self.fake_free_list_head.next_free_block
        while node is not self.fake_free_list_tail:
            free += reversed(node.blocks) if type(node) is Run else (node,)
            node = node.next_free_block
        return free

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        self.pool.dissolve()
        return FreeKVCacheBlockQueue.iter_blocks_after(self, cursor)  # type: ignore[no-any-return]


class RunPool(QuickPool):
    """A pool with runs. Its methods do what vLLM's do, with all fields of all blocks as `dissolve` would leave them."""

    free_block_queue: RunQueue
    runs: dict[bytes, Run]
    """The runs by the key of their first block."""
    held: dict[Holder, list[Run]]
    """In the order of their positions."""

    def adopt_runs(self, groups: Iterable[int]) -> None:
        """Keep runs of these groups from now on, with all blocks free that no request holds."""
        self.groups = frozenset(groups)
        self.runs, self.held = {}, {}
        self.free_block_queue.__class__ = RunQueue
        self.free_block_queue.pool = self

    def unusual(self) -> bool:
        if not QuickPool.unusual(self):
            return False
        RunPool.dissolve(self)
        return True

    def find(self, keys: Sequence[bytes], count: int) -> Hit:
        """Return the cached blocks of the first `count` keys up to the first key that has none."""
        hit = Hit()
        place, cached = 0, self.cached_block_hash_to_block._cache
        while place < count:
            key = keys[place]
            run = self.runs.get(key)
            if run is None:
                entry = cached.get(key)
                if entry is None:
                    break
                # Of several blocks with one hash vLLM takes the first.
                hit.append(next(iter(entry.values())) if isinstance(entry, dict) else entry)
                place += 1
                continue
            size = run.common(keys, count - place)
            hit += run.blocks if size == len(run.blocks) else run.blocks[:size]
            place += size
            hit.runs.append((run, place))
        return hit

    def are_hashed(self, count: int) -> list[bool]:
        """Return whether each of the next blocks of the queue has a hash, which is lost when the block is taken."""
        hashed: list[bool] = []
        node: Any = self.free_block_queue.fake_free_list_head.next_free_block
        while len(hashed) < count:
            hashed += [True] * len(node.blocks) if type(node) is Run else (node._block_hash is not None,)
            node = node.next_free_block
        return hashed[:count]

    def are_new(self, keys: Sequence[bytes]) -> bool:
        """Whether no two of these keys are equal, and no block has one of them."""
        return len(set(keys)) == len(keys) and self.cached_block_hash_to_block._cache.keys().isdisjoint(keys)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        if type(blocks) is Hit and blocks.holder and not self.metrics_collector:
            self._join(blocks, blocks.holder)
            return
        if any(block.ref_cnt == IN_RUN for block in blocks):
            RunPool.dissolve(self)
        BlockPool.touch(self, blocks)

    def _join(self, hit: Hit, holder: Holder) -> None:
        """Give a request the runs that it hits, and its other blocks."""
        held = []
        for run, first, end in [*hit.pieces()]:
            if run is None:
                blocks = [*islice(hit, first, end)]
                BlockPool.touch(self, blocks)
                if all(block.ref_cnt == 1 for block in blocks):  # no other request has them
                    for block in blocks:
                        block.ref_cnt = IN_RUN
                    held.append(Run(self, first, blocks, {holder}))
                continue
            if end < run.end:
                run.split(end - first)
            if not run.holders:  # it was free
                before, after = run.prev_free_block, run.next_free_block
                before.next_free_block, after.prev_free_block = after, before
                run.prev_free_block = run.next_free_block = None
                self.free_block_queue.num_free_blocks -= len(run.blocks)
            run.holders.add(holder)
            held.append(run)
        if held:
            self.held[holder] = held

    def cache_full_blocks(self, *args: Any, **named: Any) -> None:
        filled = Filled(*args, **named)
        request, blocks, first, num_full_blocks, block_size, group, block_mask = filled
        hashes = request.block_hashes
        if block_mask is None and group in self.groups and type(hashes) is BlockHashes and not self.unusual():
            cached = self.cached_block_hash_to_block._cache
            new = blocks[first:num_full_blocks]
            keys = hashes.chain.keys(group)[first : min(num_full_blocks, len(hashes))]
            twice = sum(1 for _ in takewhile(cached.__contains__, keys))  # their content is cached already
            if (
                len(new) == len(keys)
                and cached.keys().isdisjoint(keys[twice:])
                and all(block.ref_cnt == 1 and block._block_hash is None for block in new)
            ):
                for n in range(twice):
                    new[n]._block_hash = keys[n]
                    new[n]._block_hash_num_tokens = (first + n + 1) * block_size
                    self.cached_block_hash_to_block.insert(keys[n], new[n])
                if twice < len(new):
                    self.cache_new((group, request.request_id), first + twice, new[twice:], keys[twice:])
                return
        QuickPool.cache_full_blocks(self, *filled)

    def cache_new(self, holder: Holder, first: int, new: list[KVCacheBlock], keys: Sequence[bytes]) -> None:
        """Give a request's blocks from `first` on these keys, which no block has, and a run."""
        size = self.hash_block_size
        for number, (block, key) in enumerate(zip(new, keys, strict=True), first + 1):
            block._block_hash, block._block_hash_num_tokens = key, number * size
            block.ref_cnt = IN_RUN
        self.cached_block_hash_to_block._cache.update(zip(keys, new, strict=True))
        held = self.held.setdefault(holder, [])
        last = held[-1] if held else None
        if last is not None and last.end == first and len(last.holders) == 1:
            last.blocks += new
        else:
            held.append(Run(self, first, new, {holder}))

    def free_held(self, holder: Holder, blocks: list[KVCacheBlock]) -> None:
        """Free the blocks that a request had in a group, the last first."""
        nodes: list[Any] = []
        upto = len(blocks)
        for run in reversed(self.held.pop(holder, ())):
            end = run.end
            nodes += reversed(blocks[end:upto])
            upto = run.first
            run.holders.remove(holder)
            if run.holders:
                continue
            if nodes and type(nodes[-1]) is Run and nodes[-1].first == end:
                rest = nodes.pop()
                del self.runs[rest._block_hash]
                run.blocks += rest.blocks
            run.ref_cnt = 1
            nodes.append(run)
        nodes += reversed(blocks[:upto])
        QuickPool.free_blocks(self, nodes)
        self.free_block_queue.num_free_blocks += sum(
            len(node.blocks) - 1 for node in nodes if type(node) is Run
        )

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        if any(block.ref_cnt == IN_RUN for block in blocks):
            RunPool.dissolve(self)
        QuickPool.free_blocks(self, blocks)

    def dissolve(self) -> None:
        """Become a pool without runs, for good. Methods that were bound before may call it again."""
        queue = self.free_block_queue
        for run in self.runs.values():
            for block in run.blocks:
                block.ref_cnt = len(run.holders)
            if not run.holders:
                before, after = run.prev_free_block, run.next_free_block
                for block in reversed(run.blocks):
                    before.next_free_block, block.prev_free_block = block, before
                    before = block
                before.next_free_block, after.prev_free_block = after, before
        self.groups, self.runs = frozenset(), {}
        self.__class__ = QuickPool
        queue.__class__ = FreeKVCacheBlockQueue


def _without_runs(name: str) -> Any:
    def method(pool: RunPool, *args: Any, **options: Any) -> Any:
        RunPool.dissolve(pool)
        return getattr(BlockPool, name)(pool, *args, **options)

    return method


for _name in (
    "evict_blocks",
    "reset_prefix_cache",
    "unpin_blocks",
    "cache_partial_block",
    "move_block_hashes",
):
    setattr(RunPool, _name, _without_runs(_name))
