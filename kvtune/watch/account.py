"""Counts a running server's missed prompt tokens by cause, from its KV events alone. Pure.

Only whole blocks are counted. A hit makes no event: the server's own counters have the hits. The blocks that a request
computes in one step are one stretch; it is compared with the blocks that were held and known before:

    parent's end .. held: computed twice ..|.. once held: evicted ..|.. computed: not retained ..|.. never seen .. end

A stretch of one held block is the block of the prompt's last token, which every hit leaves out: `last_token`.

Blocks that only another data-parallel rank has computed are `other_engine`, not `never seen`.

A stretch of one block that follows the newest block of a prompt may belong to the answer: it counts as `answers`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvtune.watch.blocks import UNKNOWN, Blocks, Evicted, Stretch
from kvtune.watch.events import Hash, Received

PREFIXES = 10_000
"""Most prefixes, and most points of divergence, that are remembered. Beyond that the least recently seen is dropped."""
KEPT_S = 60
FEWEST_SHARED = 8
"""Fewest common first tokens of two prompts for a divergence: fewer are chance, or a chat template's beginning."""
RECOMPUTED = ("computed_twice", "evicted", "not_retained", "other_engine", "unknown", "cold", "last_token")
"""Causes in the order in which tokens recomputed after a preemption are taken from them: likely causes first."""
GROWING = 2
"""Maximum number of steps between two stretches of one prompt. A stretch after a longer pause begins a new prompt."""


@dataclass(slots=True)
class Prefix:
    """Prompts with the same first block. `lost_tokens`: tokens that were computed before, but missed."""

    visits: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0
    longest: int = 0
    last: float = 0.0


@dataclass(slots=True)
class Divergence:
    """Prompts that first differ from an earlier one at token `position`. `root`: the earlier prompt's first block."""

    position: int
    root: Hash
    times: int = 0
    new_tokens: int = 0
    last: float = 0.0


@dataclass(slots=True)
class Account:
    """Missed tokens of whole blocks by cause, and those of `answers`. `complete`: no event is missing."""

    complete: bool = True
    tokens: Counter[str] = field(default_factory=Counter)
    evicted_blocks: int = 0
    blocks: dict[int, Blocks] = field(default_factory=dict)
    ages: deque[tuple[float, float]] = field(default_factory=deque)
    """Evictions of the last minute: the time of each, and the seconds since the block was stored."""
    prefixes: OrderedDict[Hash, Prefix] = field(default_factory=OrderedDict)
    divergences: OrderedDict[tuple[Hash | None, int], Divergence] = field(default_factory=OrderedDict)
    _tails: dict[tuple[int, Hash], int] = field(default_factory=dict)

    def add(self, received: Received) -> None:
        for stretch, blocks in self.stretches(received):
            self.judge(stretch, blocks)

    def stretches(self, received: Received) -> Iterator[tuple[Stretch, Blocks]]:
        """Yield each stretch of a batch, with its rank's blocks as they were before the stretch."""
        batch = received.batch
        if received.fresh:
            self.blocks.pop(received.rank, None)
        blocks = self.blocks.setdefault(received.rank, Blocks(received.rank))
        evicted = Evicted()
        for stretch in blocks.stretches(batch, evicted):
            yield stretch, blocks
        self.ages.extend((batch.ts, age) for age in evicted.ages_s)
        while self.ages and self.ages[0][0] < batch.ts - KEPT_S:
            self.ages.popleft()
        self.evicted_blocks += evicted.blocks

    def judge(self, stretch: Stretch, blocks: Blocks) -> None:
        size = stretch.block_size
        tail = None if stretch.parent is None else self._tails.pop((stretch.rank, stretch.parent), None)
        self._tails[stretch.rank, stretch.hashes[-1]] = stretch.step
        if len(self._tails) > PREFIXES:
            del self._tails[next(iter(self._tails))]
        if tail is not None and len(stretch.hashes) == 1 and not blocks.behind(stretch.parent):
            self._count("answers", size)
            return
        before = blocks.chain(stretch.parent)
        root = before[0] if before else stretch.hashes[0]
        rooted = blocks.known[root].end != UNKNOWN if before else stretch.parent is None
        chain = [*before, *stretch.hashes]
        start = len(before)
        seen = blocks.seen(chain, stretch.step)
        live = blocks.live(chain[:seen]) if seen > start else start
        kept = blocks.ever(chain[:seen]) if seen > start else start
        live, kept = max(start, live), max(start, live, kept)
        again = "last_token" if live - start == 1 == len(stretch.hashes) else "computed_twice"
        new = len(chain) - max(seen, start)
        elsewhere = self._elsewhere(stretch.rank, chain[len(chain) - new :])
        unknown = not rooted or not self.complete
        for cause, count in (
            (again, live - start),
            ("evicted", kept - live),
            ("not_retained", max(0, seen - kept)),
            ("other_engine", elsewhere),
            ("unknown" if unknown else "cold", new - elsewhere),
        ):
            self._count(cause, count * size)
        continues = tail is not None and stretch.step - tail <= GROWING
        if rooted and not continues:
            self._visit(
                root, stretch, start * size, max(0, seen - max(start, live)) * size, len(chain) * size
            )
            if new:
                self._diverged(stretch, chain, seen, blocks, new * size)

    def _elsewhere(self, rank: int, chain: list[Hash]) -> int:
        """Count the blocks at the beginning of `chain` that other ranks have computed."""
        others = [blocks.known for number, blocks in self.blocks.items() if number != rank]
        count = 0
        while others and count < len(chain) and any(chain[count] in known for known in others):
            count += 1
        return count

    def _visit(self, root: Hash, stretch: Stretch, hit: int, lost: int, end: int) -> None:
        prefix = self.prefixes.pop(root, None) or Prefix()
        self.prefixes[root] = prefix
        prefix.visits += 1
        prefix.hit_tokens += hit
        prefix.lost_tokens += lost
        prefix.longest = max(prefix.longest, end)
        prefix.last = stretch.at
        if len(self.prefixes) > PREFIXES:
            self.prefixes.popitem(last=False)

    def _diverged(self, stretch: Stretch, chain: list[Hash], seen: int, blocks: Blocks, new: int) -> None:
        start = len(chain) - len(stretch.hashes)
        if seen < start:
            return
        parent = chain[seen - 1] if seen else None
        shared, other = blocks.nearest(parent, stretch.tokens[seen - start])
        if other is None or (parent is None and shared < FEWEST_SHARED):
            return
        position = seen * stretch.block_size + shared
        key = (parent, shared)
        found = self.divergences.pop(key, None) or Divergence(position, blocks.known[other].root)
        self.divergences[key] = found
        found.times += 1
        found.new_tokens += new
        found.last = stretch.at
        if len(self.divergences) > PREFIXES:
            self.divergences.popitem(last=False)

    def _count(self, cause: str, tokens: int) -> None:
        if tokens > 0:
            self.tokens[cause] += tokens

    def ages_since(self, at: float) -> list[float]:
        return [age for when, age in self.ages if when >= at]
