"""A prompt as KV events show it: the blocks that it hit, and those that it computed, one chunk a step. Pure.

A hit makes no event: the hit ends where the first chunk begins. Each block has what was known of it before it was
stored. So it does not matter when the prompt is judged, and it is judged once, when all its chunks have come:

    0 .. hit .. held: computed twice ..|.. lost by a reset ..|.. once held: evicted ..|.. computed: not retained
    ..|.. another rank, another server, another salt has it ..|.. never seen .. end

A prompt that computes one held block computes the block of its last token, which every hit leaves out: `last_token`.
In a full pool that block may be evicted by its own computation: then it counts as evicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from kvtune.data.causes import OTHER_REPLICA
from kvtune.data.tally import split
from kvtune.servers.watch.blocks import UNKNOWN, Blocks, State, Stretch, seen_of
from kvtune.servers.watch.elsewhere import Elsewhere
from kvtune.servers.watch.events import Hash
from kvtune.servers.watch.lists import Difference, difference
from kvtune.servers.watch.tier import LOWER

GROWING = 2
"""Most steps between two chunks of one prompt: what follows after a longer pause is another prompt."""


@dataclass(slots=True, eq=False)
class Prompt:
    """`chain`: its blocks up to now, of which the first `hit` were in the cache. `first`, `last`: its chunks.

    `rooted`: its beginning is known. `states`: what was known of its first blocks; of those after a new one, nothing.
    `elsewhere`: what other servers had of it. Of each block that it computed, `tokens`: its tokens; `on_ranks`: whether
    another rank had computed it. `singles`: blocks at its end that came one by one: they are an answer's,
    unless a longer chunk follows.
    """

    blocks: Blocks
    first: Stretch
    last: Stretch
    chain: list[Hash]
    hit: int
    rooted: bool
    states: list[State]
    on_ranks: list[bool]
    elsewhere: Elsewhere
    tokens: list[bytes]
    singles: int = 0
    gone_s: tuple[float, float] | None = None
    """How long a tier kept the first block that it had evicted, and how long before it had been stored."""
    compared: bool = False
    differs: Difference | None = None
    """Where it differs from the nearest known prompt, once it was `compared`."""

    @classmethod
    def opened(cls, chunk: Stretch, blocks: Blocks, before: list[Hash]) -> Prompt:
        """Open a prompt at its first chunk. The chain of blocks before that, it has hit."""
        return cls(
            blocks=blocks,
            first=chunk,
            last=chunk,
            chain=before,
            hit=len(before),
            rooted=blocks.known[before[0]].end != UNKNOWN if before else chunk.parent is None,
            states=blocks.states(before) if chunk.hashes[0] in blocks.known else [],
            on_ranks=[],
            elsewhere=Elsewhere(chunk.at, []),
            tokens=[],
        )

    def grow(self, chunk: Stretch, ranks: Sequence[Blocks]) -> None:
        """Add a chunk before its blocks are stored. `ranks`: the other ranks of its server."""
        if len(self.states) == len(self.chain) and chunk.hashes[0] in self.blocks.known:
            self.states += self.blocks.states(chunk.hashes)
        self.on_ranks += [any(name in rank.known for rank in ranks) for name in chunk.hashes]
        self.chain += chunk.hashes
        self.tokens += chunk.tokens
        self.last = chunk
        if self.rooted and not self.compared and (seen := self.seen) < len(self.chain):
            self.compared = True
            tokens = self.tokens[seen - len(self.chain)]
            self.differs = difference(self.blocks, self.chain, tokens, seen, self.first.space)

    def may_grow(self, step: int) -> bool:
        """Whether a chunk may come in this step: the scheduler cuts a prompt only where a step is full."""
        return step - self.last.step <= GROWING and self.blocks.filled(self.last.step, self.size)

    @property
    def end(self) -> tuple[int, int, Hash]:
        """Rank, step and last block of its last chunk."""
        return self.blocks.rank, self.last.step, self.chain[-1]

    def drop_singles(self) -> None:
        """Let go of the blocks at its end that are an answer's."""
        for row in (self.chain, self.on_ranks, self.tokens) if self.singles else ():
            del row[-self.singles :]
        del self.states[len(self.chain) :]
        self.singles = 0

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.first.block_size

    @property
    def open_tokens(self) -> int:
        """Tokens that it computed, without those that may be its answer's."""
        return self.size * (len(self.chain) - self.hit - self.singles)

    @property
    def seen(self) -> int:
        """Its first blocks that were computed before its first step."""
        return min(max(self.hit, seen_of(self.states, self.first.step)), len(self.chain))

    @property
    def held(self) -> tuple[int, int, int]:
        """Its first blocks that the pool held then, that it held until a reset, and that it held at any time."""
        return self.blocks.reaches(self.states[: self.seen]) if self.seen > self.hit else (0, 0, 0)

    @property
    def on_ranks_until(self) -> int:
        """Its first blocks that a rank of its server had computed."""
        end = len(self.chain)
        return next((n for n in range(self.seen, end) if not self.on_ranks[n - end]), end)

    @property
    def known_until(self) -> int:
        """Its first blocks that a server had computed."""
        return max(self.on_ranks_until, self.elsewhere.computed_until(self.seen, len(self.chain)))

    @property
    def one_held(self) -> bool:
        """Whether it computed one block, which was held: that of its last token."""
        return self.held[0] - self.hit == 1 == len(self.chain) - self.hit

    def causes(self, *, whole: bool, below: bool = False) -> dict[str, int]:
        """Return the tokens that it computed by cause, or by what tiers `below` had; `whole`: all before is known."""
        live, reset, kept = self.held
        edges = [("last_token" if self.one_held else "computed_twice", live)]
        if below:
            lower = self.blocks.lower(self.states[self.hit : self.seen])
            edges += [(cause, self.hit + count) for cause, count in zip(LOWER, lower, strict=True)]
        else:
            edges += [("reset", reset), ("evicted", kept), ("not_retained", self.seen)]
        edges += [("other_engine", self.on_ranks_until)]
        edges += [(OTHER_REPLICA, self.known_until), ("other_salt", self._salted_until())]
        upto = accumulate((edge for _, edge in edges), max)
        rising = [(cause, edge) for (cause, _), edge in zip(edges, upto, strict=True)]
        rest = "cold" if whole and self.rooted else "unknown"
        blocks = split(len(self.chain), self.hit, rising, rest).misses
        return {cause: self.size * count for cause, count in blocks.items() if count}

    def _salted_until(self) -> int:
        """Return its first blocks that were computed under another salt."""
        if self.on_ranks_until == len(self.chain) or not self.rooted or len(self.blocks.roots) < 2:
            return 0
        blocks = self.blocks.known
        before = (blocks[name].tokens for name in self.chain[: self.hit] if name in blocks)
        text = b"".join([*before, *self.tokens])
        return self.blocks.other_space(text, self.size, self.first.space, self.first.step)
