"""What other servers had of a prompt that one server computed, by their KV events. Pure.

Blocks are compared by content: by the tokens, adapter, salt and images of a block and of all before it. Hash seeds and
algorithms do not matter. Servers with other block sizes are compared by token ids alone, whole blocks of theirs;
prompts with images are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtune.servers.watch.blocks import Blocks, Stretch


@dataclass(slots=True)
class Elsewhere:
    """What is found of one prompt, whose first chunk was computed by time `at`.

    `computed`: of each of its blocks, whether another server had computed it by then. `held`: tokens that one of them
    would have hit; `stored_at`: when that was stored. `most_held`, `most_computed`: also what they stored until a later
    chunk, which may be another prompt that goes on with this one.
    """

    at: float
    computed: list[bool]
    held: int = 0
    stored_at: float = 0.0
    most_held: int = 0
    most_computed: int = 0

    def add(
        self, before: Sequence[int], tokens: bytes, stretch: Stretch, others: Sequence[tuple[Blocks, bool]]
    ) -> None:
        """A chunk was computed after blocks `before`. `tokens`: the prompt up to its end; b"" if it has images.

        `others`: each with whether it can serve what it holds.
        """
        size, upto = stretch.block_size, len(before) + len(stretch.hashes)
        computed = len(before)
        for other, serves in others:
            same = other.size == size
            if same and stretch.contents and stretch.contents[0] in other.contents:
                names = [other.contents.get(content) for content in (*before, *stretch.contents)]
            elif other.size and not same and tokens:
                names = [*other.find(tokens, other.size, stretch.space)]
            else:
                continue
            blocks = [other.known.get(name) if name is not None else None for name in names]
            masks = [block.held if block is not None else 0 for block in blocks]
            reach = serves * other.in_tier(names, other.reach(masks))
            self.most_held = max(self.most_held, reach * other.size)
            self.most_computed = max(self.most_computed, other.size * (len(blocks) - blocks.count(None)))
            late = [n for n, block in enumerate(blocks) if block is not None and block.stored_at > self.at]
            for n in late:
                blocks[n], masks[n], names[n] = None, 0, None
            first = len(before) if same else 0  # of one before, only its hash may be forgotten
            count = blocks.index(None, first) if None in blocks[first:] else len(blocks)
            computed = max(computed, count * other.size // size)
            reach = serves * other.in_tier(names, other.reach(masks)) if late else reach
            if reach * other.size > self.held:
                last = blocks[reach - 1]
                self.held, self.stored_at = reach * other.size, last.stored_at if last is not None else 0.0
        self.computed += [index < computed for index in range(len(self.computed), upto)]

    def computed_until(self, start: int, end: int) -> int:
        """Return up to which of its blocks `start` to `end` other servers had computed all."""
        return next((n for n in range(start, end) if n >= len(self.computed) or not self.computed[n]), end)
