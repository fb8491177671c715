"""Counts a running server's missed prompt tokens by cause, from its KV events alone. Pure.

Only whole blocks are counted. A hit makes no event: the server's own counters have the hits. The blocks that a request
computes in one step are one stretch; the stretches of a prompt, one for each prefill chunk, are judged together once
no other follows (`settle`). They are compared with the blocks that were held and known when the first one was computed:

    parent's end .. held: computed twice ..|.. lost by a reset ..|.. once held: evicted ..|.. computed: not retained
    ..|.. never seen .. end

A prompt that computes one held block computes the block of its last token, which every hit leaves out: `last_token`.
In a full pool that block may be evicted by its own computation: then it counts as evicted.

Blocks that only another data-parallel rank has computed are `other_engine`, not `never seen`; those that only another
server of a fleet has computed are `other_replica`, those that were computed under another cache salt only `other_salt`.

A stretch of one block that follows the newest block of a prompt may belong to the answer: it counts as `answers`.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from bisect import bisect_right
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvtune.data.causes import OTHER_REPLICA
from kvtune.data.tally import split
from kvtune.servers.watch.blocks import UNKNOWN, Blocks, Evicted, Space, State, Stretch, seen_of
from kvtune.servers.watch.elsewhere import Elsewhere
from kvtune.servers.watch.events import Hash, Received

PREFIXES = 10_000
"""Most prefixes, and most points of divergence, that are remembered. Beyond that the least recently seen is dropped."""
KEPT_S = 60
MOST_HELD_BYTES = 400 << 20
"""Most memory for the blocks of all ranks: about 600 bytes a block (measured: 550), and its tokens."""
BLOCK_BYTES = 600
FEWEST_SHARED = 8
"""Fewest common first tokens of two prompts for a divergence: fewer are chance, or a chat template's beginning."""
SIDE = 8
"""Tokens that are kept of each side of a difference, to show them as text."""
MOST_WALKED = 4_000_000
"""Most blocks before the stretches of one batch: 64 prompts of a million tokens. A batch with more is not counted."""
GROWING = 2
"""Maximum number of steps between two stretches of one prompt. A stretch after a longer pause begins a new prompt."""
LOOKS = 2
"""Looks (`settle`) after which a prompt is judged, if nothing else tells that it is whole."""


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python look for circles of garbage rarely: accounts hold a million objects, and make none."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(slots=True)
class Prefix:
    """Prompts with the same first block that stored a whole block. `lost_tokens`: computed before, but missed."""

    visits: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0
    longest: int = 0
    last: float = 0.0


@dataclass(slots=True)
class Divergence:
    """Prompts that first differ from an earlier one at token `position`, after the same tokens.

    `root`: the earlier prompt's first block. `new_tokens`: tokens of these prompts in whole blocks that no prompt had
    before. `before`, `earlier`, `later`: the last common tokens, and what follows in the earlier and the newest prompt.
    """

    position: int
    root: Hash
    times: int = 0
    new_tokens: int = 0
    last: float = 0.0
    before: bytes = b""
    earlier: bytes = b""
    later: bytes = b""


@dataclass(slots=True)
class Others:
    """The other servers of a fleet, as one server's account asks them, and what it found there.

    `blocks`: those of each of them, and whether it can serve what it holds. `known`: whether no event of theirs is
    missing since their starts. `held`, `kept`: tokens beyond each prompt's hit that one of them held, or that
    any server had computed; the least and the most, as events alone tell. `still`: of the cause `other_replica`, what
    was held when it was asked for. `ages`: of these, the seconds since they were stored there.
    """

    blocks: Callable[[], Sequence[tuple[Blocks, bool]]]
    known: bool = True
    held: list[int] = field(default_factory=lambda: [0, 0])
    kept: list[int] = field(default_factory=lambda: [0, 0])
    still: int = 0
    ages: deque[float] = field(default_factory=lambda: deque(maxlen=1_000))

    def count(self, size: int, start: int, held: int, kept: int, prompt: _Open) -> None:
        """Blocks of a prompt after its hit: up to `held`, `kept`. Its last one may end with the prompt's last token."""
        end, there = len(prompt.chain), prompt.others
        for counts, edge, most in (
            (self.held, held, there.most_held // size),
            (self.kept, kept, there.most_computed // size),
        ):
            counts[0] += size * sum(n not in prompt.answers for n in range(start, min(edge, end - 1)))
            counts[1] += size * max(0, min(max(edge, most), end) - start)


Point = tuple[Hash | Space, bytes]
"""Where prompts differ: the block before (or the space, if there is none), and the common tokens after it."""


@dataclass(slots=True)
class _Open:
    """A prompt of which more chunks may come. `seen`: its first blocks, up to one that no earlier step computed.

    `states`: what was known of its first blocks before each was stored, if more than those before `start` are seen.
    `start`: blocks before its first stretch. `chain`: all its blocks up to now. `differs`: where it differs.
    """

    blocks: Blocks
    space: Space
    first_step: int
    start: int
    rooted: bool
    size: int
    chain: list[Hash]
    seen: int
    states: list[State]
    tokens: list[bytes]
    """Of each block that it computed."""
    elsewhere: list[bool]
    """Whether another rank had computed the block."""
    others: Elsewhere
    step: int
    at: float
    looks: int = 0
    answers: set[int] = field(default_factory=set)
    """Blocks of the chain that count as `answers`: of a chunk of one block, or of the answer."""
    differs: tuple[Point, Divergence] | None = None

    @property
    def tokens_open(self) -> int:
        return self.size * (len(self.chain) - self.start - len(self.answers))


@dataclass(slots=True)
class Account:
    """Missed tokens of whole blocks by cause, and those of `answers`. `complete`: no event is missing."""

    complete: bool = True
    tokens: Counter[str] = field(default_factory=Counter)
    evicted_blocks: int = 0
    blocks: dict[int, Blocks] = field(default_factory=dict)
    ages: deque[tuple[float, Counter[float]]] = field(default_factory=deque)
    """Evictions of the last minute: a step's time, and how often each number of seconds since a block was stored."""
    prefixes: OrderedDict[Hash, Prefix] = field(default_factory=OrderedDict)
    divergences: OrderedDict[Point, Divergence] = field(default_factory=OrderedDict)
    resets: int = 0
    """How often the cache was reset."""
    others: Others | None = None
    most_bytes: int = MOST_HELD_BYTES
    """Beyond it, the blocks that were evicted first are forgotten."""
    _open: dict[int, list[_Open]] = field(default_factory=dict)
    """By rank, the prompts that are not judged yet, in order of their newest stretch."""
    _walked: int = 0
    """Blocks before the stretches of this batch."""
    _newest: dict[tuple[int, Hash], int] = field(default_factory=dict)
    """The newest block of each prompt, with its step: a block after it may be an answer's."""

    def add(self, received: Received) -> None:
        for stretch, blocks in self.stretches(received):
            self.take(stretch, blocks)

    def stretches(self, received: Received) -> Iterator[tuple[Stretch, Blocks]]:
        """Yield each stretch of a batch, with its rank's blocks as they were before the stretch."""
        batch, rank = received.batch, received.rank
        self._walked = 0
        if received.fresh:
            self.forget(rank)
        if rank not in self.blocks:
            self.blocks[rank] = Blocks(rank, by_content=self.others is not None)
        blocks = self.blocks[rank]
        evicted = Evicted()
        resets = blocks.resets
        for stretch in blocks.stretches(batch, evicted):
            yield stretch, blocks
        self.resets += blocks.resets - resets
        self._judge_all(rank, lambda one: one.step < blocks.step - GROWING)
        if evicted.ages_s:
            self.ages.append((batch.ts, evicted.ages_s))
        while self.ages and self.ages[0][0] < batch.ts - KEPT_S:
            self.ages.popleft()
        self.evicted_blocks += evicted.blocks
        over = -(-(self.held_bytes - self.most_bytes) // BLOCK_BYTES)
        while over > 0:
            if not (count := max(self.blocks.values(), key=lambda blocks: blocks.remembered).forget(over)):
                break
            over -= count

    def forget(self, rank: int) -> None:
        """Begin with an empty cache and empty lists, because the rank was restarted."""
        self._judge_all(rank, lambda _: True)
        if self.blocks.pop(rank, None) is not None:
            self.forget_lists()
        self._newest = {key: step for key, step in self._newest.items() if key[0] != rank}

    def forget_lists(self) -> None:
        """Begin the lists of prefixes and of differences again."""
        self.prefixes.clear()
        self.divergences.clear()

    @property
    def held_bytes(self) -> int:
        """About the memory that the known blocks take."""
        count = sum(len(blocks.known) + len(blocks.tier) for blocks in self.blocks.values())
        return sum(blocks.bytes for blocks in self.blocks.values()) + BLOCK_BYTES * count

    @property
    def loads_told(self) -> bool:
        """Whether events tell what was loaded from tiers: all of them since the start, of all ranks."""
        return (
            self.complete and all(blocks.loads_told for blocks in self.blocks.values()) and bool(self.blocks)
        )

    @property
    def pending(self) -> int:
        """Tokens of the prompts that are not judged yet."""
        return sum(one.tokens_open for row in self._open.values() for one in row)

    def settle(self, *, whole: bool = True) -> None:
        """Judge the prompts whose last chunk has come. `whole`: no prompt is being computed, so all are whole."""
        for rank, row in self._open.items():
            for one in row:
                one.looks += 1
            self._judge_all(rank, lambda one: whole or one.looks >= LOOKS)

    def take(self, stretch: Stretch, blocks: Blocks) -> None:
        """Add a stretch to its prompt, before its blocks are stored."""
        key = None if stretch.parent is None else (stretch.rank, stretch.parent)
        newest = None if key is None else self._newest.pop(key, None)
        self._newest[stretch.rank, stretch.hashes[-1]] = stretch.step
        if len(self._newest) > PREFIXES:
            del self._newest[next(iter(self._newest))]
        single = stretch.parent is not None and newest is not None and len(stretch.hashes) == 1
        answer = single and stretch.parent is not None and not blocks.behind(stretch.parent)
        if answer:
            self._count("answers", stretch.block_size)
            self._one_block(stretch)
        row = self._open.setdefault(stretch.rank, [])
        grown = next((one for one in row if one.chain[-1] == stretch.parent), None)
        if (
            grown is not None
            and stretch.step - grown.step <= GROWING
            and blocks.filled(grown.step, grown.size)
        ):
            row.remove(grown)
        elif answer:
            return
        else:
            before = blocks.chain(stretch.parent)
            self._walked += len(before)
            if self._walked > MOST_WALKED:
                raise ValueError(f"a step has more than {MOST_WALKED:,} blocks of context")
            new = newest is None or stretch.step - newest > GROWING  # else it goes on with a computed chunk
            loaded = blocks.in_tier(stretch.hashes) if new else 0
            self._count("loaded", loaded * stretch.block_size)
            rooted = blocks.known[before[0]].end != UNKNOWN if before else stretch.parent is None
            grown = _Open(
                blocks,
                stretch.space,
                stretch.step,
                len(before) + loaded,
                rooted,
                stretch.block_size,
                before,
                next(
                    (n for n, name in enumerate(before) if blocks.known[name].step >= stretch.step),
                    len(before),
                ),
                blocks.states(before) if stretch.hashes[0] in blocks.known else [],
                [],
                [False] * len(before),
                Elsewhere(stretch.at, [False] * len(before)),
                stretch.step,
                stretch.at,
            )
        if answer:
            grown.answers.add(len(grown.chain))
        row.append(grown)
        begin = len(grown.chain)
        if self.others is not None:
            self._ask(self.others, grown, stretch, blocks)
        grown.chain += stretch.hashes
        grown.tokens += stretch.tokens
        others = [other.known for rank, other in self.blocks.items() if rank != stretch.rank]
        grown.elsewhere += (
            [any(name in known for known in others) for name in stretch.hashes]
            if others
            else [False] * len(stretch.hashes)
        )
        grown.step, grown.at, grown.looks = stretch.step, stretch.at, 0
        if grown.seen < begin:
            return
        states = blocks.states(stretch.hashes) if stretch.hashes[0] in blocks.known else []
        grown.states += states
        grown.seen += seen_of(states, grown.first_step)
        if grown.rooted and grown.differs is None and grown.seen < len(grown.chain):
            grown.differs = self._differs(grown, blocks, grown.seen)

    def _ask(self, others: Others, one: _Open, stretch: Stretch, blocks: Blocks) -> None:
        """Note what the other servers have of a prompt up to the end of this stretch."""
        size, name = stretch.block_size, stretch.contents[0] if stretch.contents else 0
        there = [row for row in others.blocks() if row[0].size != size or name in row[0].contents]
        before = [blocks.known[name] for name in one.chain if name in blocks.known] if there else []
        if not there or not one.rooted or len(before) < len(one.chain):
            one.others.computed += [False] * len(stretch.hashes)
            return
        tokens = b""
        if not stretch.images and any(other.size != size for other, _ in there):
            tokens = b"".join([*(block.tokens for block in before), *stretch.tokens])
        one.others.add([block.content for block in before], tokens, stretch, there)

    def _one_block(self, stretch: Stretch) -> None:
        """Count a block that may be an answer's, or a prompt's that another server has."""
        if self.others is not None and stretch.contents:
            name = stretch.contents[0]
            holders = [(one, serves) for one, serves in self.others.blocks() if name in one.contents]
            held = any(serves and one.known[one.contents[name]].held for one, serves in holders)
            self.others.held[1] += stretch.block_size * held
            self.others.kept[1] += stretch.block_size * bool(holders)

    def _judge_all(self, rank: int, holds: Callable[[_Open], bool]) -> None:
        row = self._open.get(rank, [])
        for one in [one for one in row if holds(one)]:
            row.remove(one)
            self._judge(one)

    def _judge(self, one: _Open) -> None:
        while len(one.chain) - 1 in one.answers:
            one.answers.remove(len(one.chain) - 1)
            for row in (one.chain, one.tokens, one.elsewhere):
                row.pop()
        blocks, size, start, states = one.blocks, one.size, one.start, one.states
        seen = min(max(start, one.seen), len(one.chain))
        live = kept = reset = start
        if seen > start:
            live = max(start, blocks.reach([state.held for state in states[:seen]]))
            reset = max(live, blocks.reach([state.held | state.reset for state in states[:seen]]))
            kept = max(reset, blocks.reach([state.kept for state in states[:seen]]))
        again = "last_token" if live - start == 1 == len(one.chain) - start else "computed_twice"
        new = len(one.chain) - seen
        elsewhere = next((n for n, known in enumerate(one.elsewhere[seen:]) if not known), new)
        there = max(seen + elsewhere, one.others.computed_until(seen, len(one.chain)))
        salted = 0
        if new > elsewhere and one.rooted and len(blocks.roots) > 1:
            before = (blocks.known[name].tokens for name in one.chain[:start] if name in blocks.known)
            text = b"".join([*before, *one.tokens])
            salted = min(blocks.other_space(text, size, one.space, one.first_step), len(one.chain))
        edges = [(again, live), ("reset", reset), ("evicted", kept), ("not_retained", seen)]
        edges += [
            ("other_engine", seen + elsewhere),
            (OTHER_REPLICA, there),
            ("other_salt", max(there, salted)),
        ]
        known = self.others is None or self.others.known
        at, rest = start, "cold" if one.rooted and self.complete and known else "unknown"
        if self.others is not None and again != "last_token":
            held = one.others.held // size
            self.others.count(size, start, held, there, one)
            if there > seen + elsewhere and one.others.held:
                still = max(0, min(there, held) - seen - elsewhere)
                self.others.still += size * still
                self.others.ages.extend([one.at - one.others.stored_at] * bool(still))
        for cause, count in split(len(one.chain), start, edges, rest).misses.items():
            self._count(cause, size * (count - sum(at <= index < at + count for index in one.answers)))
            at += count
        if one.rooted:
            self._visit(one, start * size, (seen - live) * size)
            if one.differs is not None:
                self._diverged(*one.differs, (new - len(one.answers)) * size, one.at)

    def _visit(self, one: _Open, hit: int, lost: int) -> None:
        root = one.chain[0]
        prefix = self.prefixes.pop(root, None) or Prefix()
        self.prefixes[root] = prefix
        prefix.visits += 1
        prefix.hit_tokens += hit
        prefix.lost_tokens += lost
        prefix.longest = max(prefix.longest, len(one.chain) * one.size)
        prefix.last = one.at
        if len(self.prefixes) > PREFIXES:
            self.prefixes.popitem(last=False)

    def _differs(self, one: _Open, blocks: Blocks, seen: int) -> tuple[Point, Divergence] | None:
        """Return where the prompt differs from the nearest known prompt; None if no prompt is near."""
        parent = one.chain[seen - 1] if seen else None
        first = len(one.chain) - len(one.tokens)
        tokens = one.tokens[seen - first]
        shared, other = blocks.nearest(parent, tokens, one.space)
        if other is None or (parent is None and shared < FEWEST_SHARED):
            return None
        cut, theirs = 4 * shared, blocks.known[other].tokens
        before = (blocks.known[parent].tokens if parent is not None else b"") + tokens[:cut]
        return (one.space if parent is None else parent, tokens[:cut]), Divergence(
            seen * one.size + shared,
            blocks.known[other].root,
            before=before[-4 * SIDE :],
            earlier=theirs[cut : cut + 4 * SIDE],
            later=tokens[cut : cut + 4 * SIDE],
        )

    def _diverged(self, point: Point, fresh: Divergence, new: int, at: float) -> None:
        found = self.divergences.pop(point, None) or fresh
        self.divergences[point] = found
        found.times += 1
        found.new_tokens += new
        found.last = at
        found.later = fresh.later
        if len(self.divergences) > PREFIXES:
            self.divergences.popitem(last=False)

    def _count(self, cause: str, tokens: int) -> None:
        if tokens > 0:
            self.tokens[cause] += tokens

    def median_age_s(self, at: float) -> float | None:
        """Return the median age of the blocks that were evicted since then; None if there is none."""
        counts: Counter[float] = Counter()
        for when, ages_s in self.ages:
            if when >= at:
                counts.update(ages_s)
        ages = sorted(counts)
        ends = list(accumulate(counts[age] for age in ages))
        middles = ((ends[-1] - 1) // 2, ends[-1] // 2) if ends else ()
        return statistics.mean(ages[bisect_right(ends, n)] for n in middles) if middles else None
