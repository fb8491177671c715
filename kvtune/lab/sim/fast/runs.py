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

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, cast

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from kvtune.lab.sim.chains import BlockHashes
from kvtune.plugin.core.cache.quick import QuickPool
from kvtune.plugin.vllm.types import Request

IN_RUN = -1
"""The reference count of a block whose run knows it."""

Cached = dict[bytes, "KVCacheBlock | dict[int, KVCacheBlock]"]


class Run:
    """Blocks of consecutive positions from `first` on. `holders`: the requests that have it; without any it is free."""

    __slots__ = ("blocks", "first", "group", "holders", "next_free_block", "prev_free_block")

    def __init__(self, group: GroupRuns, first: int, blocks: list[KVCacheBlock], holders: set[str]) -> None:
        self.group, self.first, self.blocks, self.holders = group, first, blocks, holders
        group.by_key[cast(bytes, blocks[0]._block_hash)] = self
        self.prev_free_block: Any = None
        self.next_free_block: Any = None

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    def common(self, keys: Sequence[bytes], most: int) -> int:
        """Return how many of the first `most` blocks have these keys. After one that differs, all do."""
        blocks, first = self.blocks, self.first
        most = min(most, len(blocks))
        if blocks[most - 1]._block_hash == keys[first + most - 1]:
            return most
        least = 1  # the first is the one by which the run was found
        while least + 1 < most:
            middle = (least + most) // 2
            if blocks[middle - 1]._block_hash == keys[first + middle - 1]:
                least = middle
            else:
                most = middle
        return least


class GroupRuns:
    """The runs of one KV cache group, by the key of their first block and, in their order, by request."""

    __slots__ = ("by_key", "of_request")

    def __init__(self) -> None:
        self.by_key: dict[bytes, Run] = {}
        self.of_request: dict[str, list[Run]] = {}

    def find(self, cached: Cached, keys: Sequence[bytes], count: int) -> Hit:
        """Return the cached blocks of the first `count` keys up to the first key that has none."""
        hit = Hit(self)
        place, by_key = 0, self.by_key
        while place < count:
            key = keys[place]
            run = by_key.get(key)
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

    def split(self, run: Run, size: int) -> Run:
        """Leave a run its first `size` blocks, and return a run of the others."""
        rest = Run(self, run.first + size, run.blocks[size:], set(run.holders))
        del run.blocks[size:]
        for name in run.holders:
            runs = self.of_request[name]
            runs.insert(runs.index(run) + 1, rest)
        if not run.holders:  # the rest is evicted first
            before = run.prev_free_block
            rest.prev_free_block, rest.next_free_block = before, run
            before.next_free_block = run.prev_free_block = rest
        return rest


class Hit(list[KVCacheBlock]):
    """The cached blocks of a prompt in one group, and the runs that have them up to a position; others have none.

    Blocks may have been dropped at the end since. `request_id`: whose blocks they become.
    """

    __slots__ = ("group", "request_id", "runs")

    def __init__(
        self, group: GroupRuns, blocks: Iterable[KVCacheBlock] = (), runs: Iterable[tuple[Run, int]] = ()
    ) -> None:
        super().__init__(blocks)
        self.group = group
        self.runs = [*runs]
        self.request_id = ""

    def __getitem__(self, index: Any) -> Any:
        part = super().__getitem__(index)
        return Hit(self.group, part, self.runs) if isinstance(index, slice) and not index.start else part

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
                del node.group.by_key[taken[-1]._block_hash]
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
    groups: dict[int, GroupRuns]

    def adopt_runs(self, groups: Iterable[int]) -> None:
        """Keep runs of these groups from now on, with all blocks free that no request holds."""
        self.groups = {group: GroupRuns() for group in groups}
        self.free_block_queue.__class__ = RunQueue
        self.free_block_queue.pool = self

    def find(self, hashes: BlockHashes, group: int, count: int) -> Hit:
        """Return the cached blocks of the first `count` hashes up to the first that has none."""
        return self.groups[group].find(
            self.cached_block_hash_to_block._cache, hashes.chain.keys(group), count
        )

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

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if self.unusual():
            RunPool.dissolve(self)
        return QuickPool.get_new_blocks(self, num_blocks)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        if type(blocks) is Hit and blocks.request_id and not self.metrics_collector:
            self._join(blocks)
            return
        if any(block.ref_cnt == IN_RUN for block in blocks):
            RunPool.dissolve(self)
        QuickPool.touch(self, blocks)

    def _join(self, hit: Hit) -> None:
        """Give the request of a hit the runs that it hits, and its other blocks."""
        held, group = [], hit.group
        for run, first, end in [*hit.pieces()]:
            if run is None:
                blocks = [*islice(hit, first, end)]
                QuickPool.touch(self, blocks)
                if all(block.ref_cnt == 1 for block in blocks):  # no other request has them
                    for block in blocks:
                        block.ref_cnt = IN_RUN
                    held.append(Run(group, first, blocks, {hit.request_id}))
                continue
            if end < run.end:
                group.split(run, end - first)
            if not run.holders:
                before, after = run.prev_free_block, run.next_free_block
                before.next_free_block, after.prev_free_block = after, before
                run.prev_free_block = run.next_free_block = None
                self.free_block_queue.num_free_blocks -= end - first
            run.holders.add(hit.request_id)
            held.append(run)
        if held:
            group.of_request[hit.request_id] = held

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        if self.unusual():
            RunPool.dissolve(self)
        elif block_mask is None and kv_cache_group_id in self.groups:
            hashes, first, end = request.block_hashes, num_cached_blocks, num_full_blocks
            if (
                type(hashes) is BlockHashes
                and first < end <= len(hashes)
                and self.cache_run(
                    kv_cache_group_id,
                    request.request_id,
                    blocks[first:end],
                    hashes.chain.keys(kv_cache_group_id)[first:end],
                    first,
                )
            ):
                return
        QuickPool.cache_full_blocks(
            self,
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            block_mask,
        )

    def cache_run(
        self, group_id: int, name: str, new: list[KVCacheBlock], keys: Sequence[bytes], first: int
    ) -> bool:
        """Give a request's blocks from `first` on these keys and a run.

        False if one has a key already, or another block has the key of a later one.
        """
        cached = self.cached_block_hash_to_block._cache
        for block in new:
            if block.ref_cnt != 1 or block._block_hash is not None or block.is_null:
                return False
        twice = 0
        if not cached.keys().isdisjoint(keys):
            twice = sum(1 for _ in takewhile(cached.__contains__, keys))
            if not cached.keys().isdisjoint(keys[twice:]):
                return False
        size = self.hash_block_size
        for number, (block, key) in enumerate(zip(new[:twice], keys, strict=False), first + 1):
            block._block_hash, block._block_hash_num_tokens = key, number * size
            self.cached_block_hash_to_block.insert(key, block)
        if twice < len(new):
            self.cache_new(group_id, name, first + twice, new[twice:], keys[twice:])
        return True

    def cache_new(
        self, group_id: int, name: str, first: int, new: list[KVCacheBlock], keys: Sequence[bytes]
    ) -> None:
        """Give a request's blocks from `first` on these keys, which no block has, and a run."""
        size = self.hash_block_size
        for number, (block, key) in enumerate(zip(new, keys, strict=True), first + 1):
            block._block_hash, block._block_hash_num_tokens = key, number * size
            block.ref_cnt = IN_RUN
        self.cached_block_hash_to_block._cache.update(zip(keys, new, strict=True))
        group = self.groups[group_id]
        held = group.of_request.setdefault(name, [])
        last = held[-1] if held else None
        if last is not None and last.end == first and len(last.holders) == 1:
            last.blocks += new
        else:
            held.append(Run(group, first, new, {name}))

    def free_request(self, group_id: int, request_id: str, blocks: list[KVCacheBlock]) -> None:
        """Free the blocks that a request had in a group, the last first."""
        group = self.groups.get(group_id)
        held = group.of_request.pop(request_id, ()) if group is not None else ()
        early: list[KVCacheBlock] = []
        late: list[Any] = []
        upto = len(blocks)
        for run in reversed(held):
            end = run.end
            if end < upto:
                _leave(islice(blocks, end, upto), early, late)
            upto = run.first
            run.holders.remove(request_id)
            if run.holders:
                continue
            if late and type(late[-1]) is Run and late[-1].first == end:
                rest = late.pop()
                del rest.group.by_key[rest.blocks[0]._block_hash]
                run.blocks += rest.blocks
            late.append(run)
        _leave(islice(blocks, upto), early, late)
        queue = self.free_block_queue
        queue.prepend_n(early)
        queue.append_n(late)
        queue.num_free_blocks += sum(len(node.blocks) - 1 for node in late if type(node) is Run)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        if any(block.ref_cnt == IN_RUN for block in blocks):
            RunPool.dissolve(self)
        QuickPool.free_blocks(self, blocks)

    def dissolve(self) -> None:
        """Become a pool without runs, for good. Methods that were bound before may call it again."""
        queue = self.free_block_queue
        for group in self.groups.values():
            for run in group.by_key.values():
                for block in run.blocks:
                    block.ref_cnt = len(run.holders)
                if not run.holders:
                    before, after = run.prev_free_block, run.next_free_block
                    for block in reversed(run.blocks):
                        before.next_free_block, block.prev_free_block = block, before
                        before = block
                    before.next_free_block, after.prev_free_block = after, before
        self.groups = {}
        self.__class__ = QuickPool
        queue.__class__ = FreeKVCacheBlockQueue

    def evict_blocks(self, block_ids: set[int]) -> None:
        RunPool.dissolve(self)
        BlockPool.evict_blocks(self, block_ids)

    def reset_prefix_cache(self) -> bool:
        RunPool.dissolve(self)
        return BlockPool.reset_prefix_cache(self)  # type: ignore[no-any-return]

    def unpin_blocks(self, *args: Any) -> None:
        RunPool.dissolve(self)
        BlockPool.unpin_blocks(self, *args)

    def cache_partial_block(self, *args: Any, **kwargs: Any) -> Any:
        RunPool.dissolve(self)
        return BlockPool.cache_partial_block(self, *args, **kwargs)

    def move_block_hashes(self, *args: Any) -> None:
        RunPool.dissolve(self)
        BlockPool.move_block_hashes(self, *args)


def _leave(blocks: Iterable[KVCacheBlock], early: list[KVCacheBlock], late: list[Any]) -> None:
    """Take a request from blocks without a run, the last first, and sort those that are free now by when they go."""
    for block in reversed(list(blocks)):
        if block.is_null:
            continue
        block.ref_cnt -= 1
        if block.ref_cnt == 0:
            (early if block._block_hash is None else late).append(block)
