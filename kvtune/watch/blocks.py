"""Rebuilds from KV events which blocks a server's prefix cache holds and has held. Pure.

Each data-parallel rank has one `Blocks`. A *stretch* is what one request computed in one step: the same tokens in every
group of the KV cache. Its caller judges it before its blocks are added. Groups differ in the blocks that a later prompt
needs for a hit up to a boundary:

    full attention    every block before it
    sliding window    the blocks of the last window - 1 tokens before it
    mamba             the state at the boundary: the last block
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from kvtune.watch.events import Batch, Cleared, Hash, Removed, Stored
from kvtune.workload.token_ids import agreeing, packed

REMEMBERED = 200_000
"""Most evicted blocks that are remembered. Beyond that the earliest evicted is forgotten (see `Blocks.forgotten`)."""
FULL = "full_attention"
MAMBA = "mamba"
UNKNOWN = -1


@dataclass(slots=True)
class Block:
    """A known block. `copies`: how often each group holds the block now; `kept`: the groups that ever held it, as bits.

    `end`: tokens of the prompt up to the block's end; UNKNOWN if the beginning of its chain was not seen.
    """

    parent: Hash | None
    root: Hash
    end: int
    tokens: bytes
    step: int
    copies: dict[int, int] = field(default_factory=dict)
    kept: int = 0
    stored_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group. `window`: tokens of its sliding window, None if it has no window."""

    kind: str
    block_size: int
    window: int | None = None

    def needs(self) -> int:
        """Return how many consecutive blocks before a boundary must be held for a hit there; 0: all blocks."""
        if self.kind == MAMBA:
            return 1
        if self.window is None:
            return 0
        return -(-(self.window - 1) // self.block_size)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks `hashes`, which follow block `parent`. `stored`: by group, the blocks that the group now holds."""

    rank: int
    at: float
    step: int
    parent: Hash | None
    hashes: tuple[Hash, ...]
    tokens: tuple[bytes, ...]
    block_size: int
    stored: dict[int, tuple[Hash, ...]]


@dataclass(slots=True)
class Evicted:
    blocks: int = 0
    ages_s: list[float] = field(default_factory=list)


class Blocks:
    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.known: dict[Hash, Block] = {}
        self.groups: dict[int, Group] = {}
        self.step = 0
        self.forgotten = 0
        self._gone: OrderedDict[Hash, None] = OrderedDict()
        self._next: dict[Hash | None, list[tuple[bytes, Hash]]] = {}
        """The blocks after each block, sorted by their tokens."""

    def stretches(self, batch: Batch, evicted: Evicted) -> Iterator[Stretch]:
        """Yield the batch's stretches in order. A stretch's blocks are added when the caller asks for the next one."""
        self.step += 1
        open_: list[Stored] = []
        for event in batch.events:
            if isinstance(event, Stored):
                if event.medium not in (None, "GPU"):
                    continue
                if open_ and not _same_stretch(open_, event):
                    yield from self._finished(open_, batch.ts)
                    open_ = []
                open_.append(event)
                continue
            if open_:
                yield from self._finished(open_, batch.ts)
                open_ = []
            if isinstance(event, Cleared):
                self.clear()
            elif event.medium in (None, "GPU"):
                self._remove(event, batch.ts, evicted)
        if open_:
            yield from self._finished(open_, batch.ts)

    def _finished(self, events: Sequence[Stored], at: float) -> Iterator[Stretch]:
        stretch = self._stretch(events, at)
        if stretch is not None:
            yield stretch
            self._store(stretch)

    def _stretch(self, events: Sequence[Stored], at: float) -> Stretch | None:
        for event in events:
            kind = event.kv_cache_spec_kind or FULL
            self.groups.setdefault(
                event.group_idx or 0, Group(kind, event.block_size, event.kv_cache_spec_sliding_window)
            )
        size = min(event.block_size for event in events)
        whole = [
            e for e in events if e.block_hashes and len(e.block_hashes) * e.block_size == len(e.token_ids)
        ]
        whole = [e for e in whole if e.block_size == size] or whole
        if not whole:
            return None
        first = whole[-1]
        size = first.block_size
        pieces = tuple(packed(first.token_ids[at : at + size]) for at in range(0, len(first.token_ids), size))
        stored = {event.group_idx or 0: tuple(event.block_hashes) for event in events}
        return Stretch(
            self.rank,
            at,
            self.step,
            first.parent_block_hash,
            tuple(first.block_hashes),
            pieces,
            size,
            stored,
        )

    def _store(self, stretch: Stretch) -> None:
        parent = self.known.get(stretch.parent) if stretch.parent is not None else None
        end = 0 if stretch.parent is None else parent.end if parent is not None else UNKNOWN
        root = parent.root if parent is not None else stretch.hashes[0]
        before = stretch.parent
        for name, tokens in zip(stretch.hashes, stretch.tokens, strict=True):
            if end != UNKNOWN:
                end += stretch.block_size
            block = self.known.get(name)
            if block is None:
                self.known[name] = Block(before, root, end, tokens, stretch.step)
                insort(self._next.setdefault(before, []), (tokens, name), key=itemgetter(0))
            elif block.end == UNKNOWN and end != UNKNOWN:
                block.end, block.root, block.parent = end, root, before
            before = name
        for group, names in stretch.stored.items():
            for name in names:
                block = self.known.get(name)
                if block is None:  # no event places it in a chain
                    continue
                block.copies[group] = block.copies.get(group, 0) + 1
                block.kept |= 1 << group
                block.stored_at = stretch.at
                self._gone.pop(name, None)
        for name in stretch.hashes:
            if not self.known[name].copies:
                self._let_go(name)

    def _remove(self, event: Removed, at: float, evicted: Evicted) -> None:
        group = event.group_idx or 0
        for name in event.block_hashes:
            block = self.known.get(name)
            evicted.blocks += 1
            if block is None:
                continue
            left = block.copies.get(group, 0) - 1
            if left > 0:
                block.copies[group] = left
                continue
            block.copies.pop(group, None)
            if block.stored_at:
                evicted.ages_s.append(max(0.0, at - block.stored_at))
            if not block.copies:
                self._let_go(name)

    def _let_go(self, name: Hash) -> None:
        self._gone[name] = None
        self._gone.move_to_end(name)
        while len(self._gone) > REMEMBERED:
            oldest, _ = self._gone.popitem(last=False)
            block = self.known.pop(oldest)
            behind = self._next[block.parent]
            behind.remove((block.tokens, oldest))
            if not behind:
                del self._next[block.parent]
            self.forgotten += 1

    def clear(self) -> None:
        """Count all held blocks as evicted, because the cache was reset."""
        for name, block in self.known.items():
            if block.copies:
                block.copies.clear()
                self._let_go(name)

    def held(self) -> int:
        """Count the blocks that at least one group holds."""
        return len(self.known) - len(self._gone)

    def behind(self, parent: Hash | None) -> int:
        """Count the known blocks that follow this one; for None, those that begin a prompt."""
        return len(self._next.get(parent, ()))

    def nearest(self, parent: Hash | None, tokens: bytes) -> tuple[int, Hash | None]:
        """Find the known block after `parent` with the longest common prefix with `tokens`.

        Return the length of that prefix in tokens, and the block; 0 and None if no block shares a token.
        """
        row = self._next.get(parent, ())
        at = bisect_left(row, tokens, key=itemgetter(0))
        best: tuple[int, Hash | None] = (0, None)
        for other, name in row[max(0, at - 1) : at + 1]:
            best = max(best, (agreeing(other, tokens), name), key=itemgetter(0))
        return best

    def find(self, prompt: bytes, size: int) -> list[Hash]:
        """Return the known blocks, of `size` tokens each, with which this prompt begins."""
        names: list[Hash] = []
        parent: Hash | None = None
        for start in range(0, len(prompt) - 4 * size + 1, 4 * size):
            agree, name = self.nearest(parent, prompt[start : start + 4 * size])
            if name is None or agree < size or len(self.known[name].tokens) != 4 * size:
                break
            names.append(name)
            parent = name
        return names

    def chain(self, parent: Hash | None) -> list[Hash]:
        """Return the chain of known blocks that ends with `parent`."""
        names: list[Hash] = []
        while parent is not None and (block := self.known.get(parent)) is not None:
            names.append(parent)
            parent = block.parent
        return names[::-1]

    def reach(self, chain: Sequence[Hash], held: Callable[[Block, int], bool]) -> int:
        """Count the chain's blocks that a prompt would hit if each group held the blocks for which `held` is true."""
        blocks = [self.known.get(name) for name in chain]
        end = len(blocks)
        groups = sorted(self.groups.items(), key=lambda item: item[1].needs() != 0)
        while True:
            before = end
            for number, group in groups:
                end = _boundary(blocks, end, group.needs(), number, held)
            if end == before:
                return end

    def live(self, chain: Sequence[Hash]) -> int:
        return self.reach(chain, lambda block, group: group in block.copies)

    def ever(self, chain: Sequence[Hash]) -> int:
        return self.reach(chain, lambda block, group: bool(block.kept >> group & 1))

    def seen(self, chain: Sequence[Hash], step: int) -> int:
        """Count the blocks at the chain's beginning that were computed before step `step`."""
        for index, name in enumerate(chain):
            block = self.known.get(name)
            if block is None or block.step >= step:
                return index
        return len(chain)


def _boundary(
    blocks: Sequence[Block | None], end: int, needs: int, group: int, held: Callable[[Block, int], bool]
) -> int:
    if needs == 0:
        for index in range(end):
            block = blocks[index]
            if block is None or not held(block, group):
                return index
        return end
    run = 0
    for index in range(end - 1, -1, -1):
        block = blocks[index]
        if block is not None and held(block, group):
            run += 1
            if run == needs:
                return index + needs
        else:
            run = 0
            end = index
    return run


def _same_stretch(events: Sequence[Stored], event: Stored) -> bool:
    last = events[-1]
    return (
        last.parent_block_hash == event.parent_block_hash
        and (event.group_idx or 0) > (last.group_idx or 0)
        and len(last.token_ids) == len(event.token_ids)
        and last.token_ids == event.token_ids
    )
