"""The other servers of a fleet, as one server's account asks them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtune.servers.watch.blocks import Blocks, Stretch
from kvtune.servers.watch.counts import Bounds
from kvtune.servers.watch.prompt import Prompt


@dataclass(slots=True)
class Others:
    """`blocks`: those of each other server, and whether a router could have used them.

    `known`: whether no event of theirs is missing since their starts. `held`, `kept`: tokens beyond each prompt's hit
    that one of them held, or that any server had computed. `still`: of the cause `other_replica`, what was held when it
    was asked for. `ages`: of these, the seconds since they were stored there.
    """

    blocks: Callable[[], Sequence[tuple[Blocks, bool]]]
    known: bool = True
    held: Bounds = field(default_factory=Bounds)
    kept: Bounds = field(default_factory=Bounds)
    still: int = 0
    ages: deque[float] = field(default_factory=lambda: deque(maxlen=1_000))

    def ask(self, prompt: Prompt, chunk: Stretch) -> None:
        """Note what the other servers have of a prompt up to the end of this chunk, before its blocks are stored."""
        prompt.elsewhere.computed += [False] * (len(prompt.chain) - len(prompt.elsewhere.computed))
        size, name = chunk.block_size, chunk.contents[0] if chunk.contents else 0
        there = [row for row in self.blocks() if row[0].size != size or name in row[0].contents]
        blocks = prompt.blocks.known
        before = [blocks[name] for name in prompt.chain if name in blocks] if there else []
        if not there or not prompt.rooted or len(before) < len(prompt.chain):
            prompt.elsewhere.computed += [False] * len(chunk.hashes)
            return
        tokens = b""
        if not chunk.images and any(other.size != size for other, _ in there):
            tokens = b"".join([*(block.tokens for block in before), *chunk.tokens])
        prompt.elsewhere.add([block.content for block in before], tokens, chunk, there)

    def one_block(self, stretch: Stretch) -> None:
        """Count a block that may be an answer's, or a prompt's that another server has."""
        name = stretch.contents[0] if stretch.contents else 0
        holders = [(blocks, serves) for blocks, serves in self.blocks() if name and name in blocks.contents]
        held = any(serves and blocks.known[blocks.contents[name]].held for blocks, serves in holders)
        self.held += Bounds(0, stretch.block_size * held)
        self.kept += Bounds(0, stretch.block_size * bool(holders))

    def count(self, prompt: Prompt) -> None:
        """Count a prompt that is whole. Its last block may end with its last token, which no server hits."""
        size, there = prompt.size, prompt.elsewhere
        held, computed, own = there.held // size, prompt.known_until, prompt.on_ranks_until

        def beyond(sure: int, most: int) -> Bounds:
            end = len(prompt.chain)
            least = min(sure, end - 1) - prompt.hit
            return Bounds(size * max(0, least), size * max(0, min(max(sure, most), end) - prompt.hit))

        self.held += beyond(held, there.most_held // size)
        self.kept += beyond(computed, there.most_computed // size)
        if still := max(0, min(computed, held) - own):
            self.still += size * still
            self.ages.append(prompt.last.at - there.stored_at)
