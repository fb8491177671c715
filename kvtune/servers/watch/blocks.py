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
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from kvtune.requests.log.token_ids import agreeing, packed
from kvtune.servers.watch.events import GPU, Batch, Cleared, Hash, Removed, Stored
from kvtune.servers.watch.tier import Tier

SPAN = 1 << 24
"""Depths between two chains whose beginnings were not seen: no message has so many blocks."""
REMEMBERED = 200_000
"""Most evicted blocks that are remembered. Beyond that the earliest evicted is forgotten (see `Blocks.forgotten`)."""
FULL = "full_attention"
MAMBA = "mamba"
UNKNOWN = -1
Space = tuple[str, str]
"""LoRA adapter and cache salt of a prompt, "" if it has none. Prompts of different spaces share no block."""
NO_SPACE: Space = ("", "")
After = Hash | list[tuple[bytes, Hash]]
"""One block alone, as nearly always; or several, by their tokens."""
NEVER = 1 << 62
WIDTHS = 8
CUTS = 256
"""Fewest tokens of a step that cuts prompts: vLLM's `max_num_batched_tokens` is larger."""
FILLED = 0.75
"""Share of the widest step's tokens from which on a step counts as full."""


class Block(msgspec.Struct, gc=False, eq=False):
    """A known block. `held`, `kept`: the groups that hold it now, and that ever held it, as bits.

    `more`: of a group that holds several copies, those beyond the first. `reset`: the groups that held it when the
    cache was last reset, as bits, until they store it again. `end`: tokens of the prompt up to the block's end; UNKNOWN
    if the beginning of its chain was not seen. `depth`: larger than that of the block before it, which is why no chain
    has a circle, whatever the events say.
    """

    parent: Hash | None
    root: Hash
    end: int
    tokens: bytes
    step: int
    depth: int
    space: Space = NO_SPACE
    held: int = 0
    kept: int = 0
    reset: int = 0
    stored_at: float = 0.0
    content: int = 0
    """Its name for other servers (see `Stretch`)."""
    more: dict[int, int] | None = None


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
    """Blocks `hashes`, which follow block `parent`. `stored`: by group, the blocks that the group now holds.

    `session`: the session id of the request that computed them; "" if it has none. `contents`: a name of each block
    that is the same at every server: of its tokens, adapter, salt and images, and of all before it. Empty: nobody asks,
    or the chain's beginning is not known. `images`: whether the blocks have any.
    """

    rank: int
    at: float
    step: int
    parent: Hash | None
    hashes: tuple[Hash, ...]
    tokens: tuple[bytes, ...]
    block_size: int
    stored: dict[int, tuple[Hash, ...]]
    space: Space = NO_SPACE
    session: str = ""
    contents: tuple[int, ...] = ()
    images: bool = False


class State(NamedTuple):
    """What was known of one block at one moment: the groups that held it, as bits (see `Block`), and since which step.

    `step`: NEVER if it was not known. `below`: the groups of which a tier held it; `ever_below`: of which one ever did.
    """

    held: int
    reset: int
    kept: int
    step: int
    below: int = 0
    ever_below: int = 0


@dataclass(slots=True)
class Evicted:
    """`ages_s`: how often each number of seconds since a block was stored; those of a step were stored together."""

    blocks: int = 0
    ages_s: Counter[float] = field(default_factory=Counter)


class Blocks:
    """`by_content`: blocks are named by content, too, to be compared with those of other servers."""

    def __init__(self, rank: int = 0, *, by_content: bool = False) -> None:
        self.rank = rank
        self.known: dict[Hash, Block] = {}
        self.by_content = by_content
        self.contents: dict[int, Hash] = {}
        """The known blocks by content."""
        self.groups: dict[int, Group] = {}
        self.size = 0
        """Tokens of a block, the smallest of all groups; 0: not known."""
        self.step = 0
        self.forgotten = 0
        self.resets = 0
        self._widths: deque[int] = deque([0], maxlen=WIDTHS)
        """Tokens that the last steps stored, the newest last."""
        self._widest = 0
        self.bytes = 0
        """Bytes of the known blocks' tokens and names."""
        self._unrooted = 1 << 60
        """Depth of the next chain whose beginning is not seen: above those seen, below those that came before it."""
        self._gone: OrderedDict[Hash, None] = OrderedDict()
        self._next: dict[Hash, After] = {}
        """What follows each block."""
        self.roots: dict[Space, After] = {}
        """The blocks that begin the prompts of each space."""
        self.tier = Tier()
        """The tiers below the pool."""

    def stretches(self, batch: Batch, evicted: Evicted) -> Iterator[Stretch]:
        """Yield the batch's stretches in order. A stretch's blocks are added when the caller asks for the next one."""
        self.step += 1
        self._widths.append(0)
        below: list[Stored | Removed] = []
        for event in _together(batch.events, below):
            if isinstance(event, Cleared):
                self.clear()
            elif isinstance(event, Removed):
                self._remove(event, batch.ts, evicted)
            elif (stretch := self._stretch(event, batch.ts)) is not None:
                self._widths[-1] += stretch.block_size * len(stretch.hashes)
                self._widest = max(self._widest, self._widths[-1])
                yield stretch
                self._store(stretch)
        for lower in below:  # what a prompt of this step found below, was there before
            self.tier.add(lower, batch.ts)

    def filled(self, step: int, size: int) -> bool:
        """Whether a recent step computed so many tokens that it may have cut a prompt into chunks.

        A chunk ends with a whole block of `size` tokens where states are kept, so a full step may lack one.
        """
        back = self.step - step
        width = self._widths[-1 - back] if back < len(self._widths) else 0
        return width >= CUTS and width + size >= FILLED * self._widest

    def _stretch(self, events: Sequence[Stored], time_s: float) -> Stretch | None:
        for event in events:
            if (number := event.group_idx or 0) not in self.groups:
                kind, window = event.kv_cache_spec_kind or FULL, event.kv_cache_spec_sliding_window
                self.groups[number] = Group(kind, event.block_size, window)
                self.tier.kinds[number] = kind
                self.size = min(group.block_size for group in self.groups.values())
        size = min(event.block_size for event in events)
        whole = [
            e for e in events if e.block_hashes and len(e.block_hashes) * e.block_size == len(e.token_ids)
        ]
        whole = [e for e in whole if e.block_size == size] or whole
        if not whole:
            return None
        first = max(reversed(whole), key=lambda e: len(e.token_ids))
        size = first.block_size
        text, step = packed(first.token_ids), 4 * size
        pieces = tuple(text[start : start + step] for start in range(0, len(text), step))
        stored = {event.group_idx or 0: tuple(event.block_hashes) for event in events}
        parent = None if first.parent_block_hash is None else self.known.get(first.parent_block_hash)
        return Stretch(
            self.rank,
            time_s,
            self.step,
            first.parent_block_hash,
            tuple(first.block_hashes),
            pieces,
            size,
            stored,
            parent.space if parent is not None else _space(first),
            first.session_id or "",
            self._contents(first, pieces, parent) if self.by_content else (),
            any(isinstance(key, list | tuple) for keys in first.extra_keys or () for key in keys or ()),
        )

    def _contents(self, event: Stored, pieces: Sequence[bytes], parent: Block | None) -> tuple[int, ...]:
        if event.parent_block_hash is not None and (parent is None or not parent.content):
            return ()
        name = parent.content if parent is not None else hash(event.lora_name or "")
        names, keys = [], event.extra_keys or []
        for index, piece in enumerate(pieces):
            key = msgspec.msgpack.encode(keys[index]) if index < len(keys) and keys[index] else b""
            name = hash((name, piece, key)) or 1  # of 64 bits, with the secret that a process of Python draws
            names.append(name)
        return tuple(names)

    def _store(self, stretch: Stretch) -> None:
        parent = self.known.get(stretch.parent) if stretch.parent is not None else None
        end, root, depth = 0, stretch.hashes[0], 0
        if parent is not None:
            end, root, depth = parent.end, parent.root, parent.depth
        elif stretch.parent is not None:
            self._unrooted -= SPAN
            end, depth = UNKNOWN, self._unrooted
        before, size, time_s = stretch.parent, stretch.block_size, stretch.at
        blocks, gone = self.known, self._gone
        contents = stretch.contents or repeat(0)
        for name, tokens, content in zip(stretch.hashes, stretch.tokens, contents, strict=False):
            if end != UNKNOWN:
                end += size
            depth += 1
            block = blocks.get(name)
            if block is None:
                block = Block(before, root, end, tokens, stretch.step, depth, stretch.space)
                blocks[name] = block
                self.bytes += _space_of(block)
                self._link(name, block)
            elif block.end == UNKNOWN and end != UNKNOWN:
                self._unlink(name, block)
                block.end, block.root, block.parent, block.depth = end, root, before, depth
                self._link(name, block)
            if content:
                block.content = content
                self.contents[content] = name
            before = name
        for group, names in stretch.stored.items():
            bit = 1 << group
            for name in names:
                block = blocks.get(name)
                if block is None:  # no event places it in a chain
                    continue
                if not block.held:
                    gone.pop(name, None)
                elif block.held & bit:
                    block.more = block.more or {}
                    block.more[group] = block.more.get(group, 0) + 1
                block.held |= bit
                block.kept |= bit
                block.reset &= ~bit
                block.stored_at = time_s
        for name in stretch.hashes:
            if (block := blocks.get(name)) is not None and not block.held:
                self._let_go(name)

    def _link(self, name: Hash, block: Block) -> None:
        rows: dict[Any, After] = self.roots if block.parent is None else self._next
        key = block.space if block.parent is None else block.parent
        after = rows.setdefault(key, name)
        if after == name:
            return
        if not isinstance(after, list):
            after = rows[key] = [(self.known[after].tokens, after)]
        insort(after, (block.tokens, name), key=itemgetter(0))

    def _unlink(self, name: Hash, block: Block) -> None:
        rows: dict[Any, After] = self.roots if block.parent is None else self._next
        key = block.space if block.parent is None else block.parent
        after = rows[key]
        if not isinstance(after, list) or len(after) == 1:
            del rows[key]
            return
        index = bisect_left(after, block.tokens, key=itemgetter(0))
        while after[index][1] != name:
            index += 1
        del after[index]

    def _after(self, parent: Hash | None, space: Space) -> Sequence[tuple[bytes, Hash]]:
        """Return the known blocks after this one (None: those that begin a prompt), sorted by their tokens."""
        after = self.roots.get(space, []) if parent is None else self._next.get(parent, [])
        return after if isinstance(after, list) else ((self.known[after].tokens, after),)

    def _remove(self, event: Removed, time_s: float, evicted: Evicted) -> None:
        group = event.group_idx or 0
        bit = 1 << group
        evicted.blocks += len(event.block_hashes)
        for name in event.block_hashes:
            block = self.known.get(name)
            if block is None:
                continue
            if block.more and (copies := block.more.get(group)):
                block.more[group] = copies - 1
                continue
            block.held &= ~bit
            if block.stored_at:
                evicted.ages_s[time_s - block.stored_at if time_s > block.stored_at else 0.0] += 1
            if not block.held:
                self._let_go(name)

    def in_tier(self, names: Sequence[Hash | None], start: int = 0) -> int:
        """Return up to which of these blocks of a prompt a tier holds what each group needs, from block `start` on.

        vLLM looks up there what follows the hit in the pool, which has the window before.
        """
        masks = [self.tier.masks(name, self.groups)[0] for name in names[start:]] if self.tier.stored else []
        return start + self.reach(masks)

    def loaded(self, stretch: Stretch, before: Sequence[Hash]) -> int:
        """Count the first blocks of a prompt's first stretch, after blocks `before`, that were loaded from a tier.

        With windows or states vLLM loads no prompt's last token: a block that the pool holds was computed for it.
        """
        count = self.in_tier(stretch.hashes)
        if count and any(group.needs() for group in self.groups.values()):
            states = self.states([*before, *stretch.hashes])
            count *= self.reach([state.held for state in states]) <= len(before)
        return count

    def lower(self, states: Sequence[State]) -> tuple[int, int, int, int]:
        """Return up to which of these blocks each of LOWER holds; the third: all but windows and states was stored."""
        held, ever = [state.below for state in states], [state.ever_below for state in states]
        whole = sum(1 << number for number, group in self.groups.items() if not group.needs())
        parts = [mask & whole == whole != 0 for mask in ever]
        return self.reach(held), self.reach(ever), [*parts, False].index(False), len(states)

    def _let_go(self, name: Hash) -> None:
        self._gone[name] = None
        self._gone.move_to_end(name)
        if len(self._gone) > REMEMBERED:
            self.forget(1)

    def forget(self, count: int) -> int:
        """Forget up to `count` blocks, those first that were evicted first. Return how many."""
        count = min(count, len(self._gone))
        for _ in range(count):
            oldest, _ = self._gone.popitem(last=False)
            block = self.known.pop(oldest)
            self.bytes -= _space_of(block)
            self._unlink(oldest, block)
            if block.content and self.contents.get(block.content) == oldest:
                del self.contents[block.content]
        self.forgotten += count
        return count

    def clear(self) -> None:
        """Empty the cache, because it was reset. The blocks that it held are remembered as lost by the reset."""
        self.resets += 1
        for name, block in [*self.known.items()]:
            if block.held:
                block.reset |= block.held
                block.held, block.more = 0, None
                self._let_go(name)

    def held(self) -> int:
        """Count the blocks that at least one group holds."""
        return len(self.known) - len(self._gone)

    @property
    def remembered(self) -> int:
        """Count the evicted blocks that are still known."""
        return len(self._gone)

    def behind(self, parent: Hash) -> int:
        """Count the known blocks that follow this one."""
        return len(self._after(parent, NO_SPACE))

    def nearest(self, parent: Hash | None, tokens: bytes, space: Space = NO_SPACE) -> tuple[int, Hash | None]:
        """Find the known block after `parent` (None: of those that begin a prompt) with the most tokens in common.

        Return the length of the common prefix in tokens, and the block; 0 and None if no block shares a token.
        """
        row = self._after(parent, space)
        index = bisect_left(row, tokens, key=itemgetter(0))
        best: tuple[int, Hash | None] = (0, None)
        for other, name in row[max(0, index - 1) : index + 1]:
            best = max(best, (agreeing(other, tokens), name), key=itemgetter(0))
        return best

    def find(self, prompt: bytes, size: int, space: Space = NO_SPACE) -> list[Hash]:
        """Return the known blocks, of `size` tokens each, with which this prompt begins."""
        names: list[Hash] = []
        parent: Hash | None = None
        for start in range(0, len(prompt) - 4 * size + 1, 4 * size):
            agree, name = self.nearest(parent, prompt[start : start + 4 * size], space)
            if name is None or agree < size or len(self.known[name].tokens) != 4 * size:
                break
            names.append(name)
            parent = name
        return names

    def other_space(self, prompt: bytes, size: int, space: Space, step: int) -> int:
        """Count the blocks with which this prompt begins under another salt of its adapter, as before step `step`."""
        others = [other for other in self.roots if other != space and other[0] == space[0]]
        counts = (seen_of(self.states(self.find(prompt, size, other)), step) for other in others)
        return max(counts, default=0)

    def chain(self, parent: Hash | None) -> list[Hash]:
        """Return the chain of known blocks that ends with `parent`."""
        names: list[Hash] = []
        depth = 1 << 62
        while parent is not None and (block := self.known.get(parent)) is not None and block.depth < depth:
            names.append(parent)
            parent, depth = block.parent, block.depth
        return names[::-1]

    def spaces(self, salt: str) -> list[Space]:
        """Return the spaces of prompts with this salt: one for each adapter."""
        return [space for space in self.roots if space[1] == salt] or [("", salt)]

    def states(self, chain: Sequence[Hash]) -> list[State]:
        """Return what is known of the chain's blocks now."""
        blocks = map(self.known.get, chain)
        below = (self.tier.masks(name, self.groups) for name in chain) if self.tier.stored else repeat((0, 0))
        return [
            State(0, 0, 0, NEVER, *under) if b is None else State(b.held, b.reset, b.kept, b.step, *under)
            for b, under in zip(blocks, below, strict=False)
        ]

    def reach(self, masks: Sequence[int]) -> int:
        """Count the blocks that a prompt would hit if the groups in `masks` (bits, one mask a block) held them."""
        end = len(masks)
        groups = sorted(self.groups.items(), key=lambda item: item[1].needs() != 0)
        while True:
            before = end
            for number, group in groups:
                end = _boundary(masks, end, group.needs(), 1 << number)
            if end == before or len(groups) == 1:
                return end

    def reaches(self, states: Sequence[State]) -> tuple[int, int, int]:
        """Count the first blocks of a prompt that were held, that were until a reset, and that were at any time."""
        live = self.reach([state.held for state in states])
        reset = max(live, self.reach([state.held | state.reset for state in states]))
        return live, reset, max(reset, self.reach([state.kept for state in states]))

    def live(self, chain: Sequence[Hash]) -> int:
        """Count the blocks that a prompt would hit in the pool, and after them in a tier."""
        return self.in_tier(chain, self.reach([state.held for state in self.states(chain)]))


def _space_of(block: Block) -> int:
    return len(block.tokens) + 4 * len(block.space[0] + block.space[1])


def seen_of(states: Sequence[State], step: int) -> int:
    """Count the blocks at the beginning that were computed before step `step`."""
    return next((index for index, state in enumerate(states) if state.step >= step), len(states))


def _space(event: Stored) -> Space:
    """The space of a prompt, from the keys of its first block: adapter, images, salt. Images are lists."""
    lora = event.lora_name or ""
    keys = (event.extra_keys or [None])[0] or ()
    salts = [key for key in keys if isinstance(key, str)][bool(lora) :]
    return lora, salts[0] if salts else ""


def _boundary(masks: Sequence[int], end: int, needs: int, bit: int) -> int:
    if needs == 0:
        return next((index for index in range(end) if not masks[index] & bit), end)
    run = 0
    for index in range(end - 1, -1, -1):
        if masks[index] & bit:
            run += 1
            if run == needs:
                return index + needs
        else:
            run = 0
            end = index
    return run


def _together(
    events: Sequence[Stored | Removed | Cleared], below: list[Stored | Removed]
) -> Iterator[list[Stored] | Removed | Cleared]:
    """Yield the events of the pool; those of one stretch in a list. The events of tiers below it go to `below`."""
    run: list[Stored] = []
    for event in events:
        if not isinstance(event, Cleared) and event.medium not in (None, GPU):
            below.append(event)
            continue
        if run and not (isinstance(event, Stored) and _same_stretch(run[-1], event)):
            yield run
            run = []
        if isinstance(event, Stored):
            run.append(event)
        else:
            yield event
    if run:
        yield run


def _same_stretch(last: Stored, event: Stored) -> bool:
    """Whether two events are of one stretch. Of a loaded one a group with a window has the last blocks alone."""
    if (event.group_idx or 0) <= (last.group_idx or 0) or last.session_id != event.session_id:
        return False
    short, long = sorted((last, event), key=lambda each: len(each.token_ids))
    same = len(short.token_ids) == len(long.token_ids)
    ends = long.token_ids[-len(short.token_ids) :] == short.token_ids
    return ends and (short.parent_block_hash == long.parent_block_hash) == same
