"""What a server's prompts share, for the screen: their first blocks, and where they first differ. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtune.servers.watch.blocks import Blocks, Space
from kvtune.servers.watch.events import Hash

MOST = 10_000
"""Most prefixes, and most points of divergence, that are remembered. Beyond that the least recently seen is dropped."""
FEWEST_SHARED = 8
"""Fewest common first tokens of two prompts for a divergence: fewer are chance, or a chat template's beginning."""
SIDE = 8
"""Tokens that are kept of each side of a difference, to show them as text."""

Point = tuple[Hash | Space, int]
"""Where prompts differ: the block before (or the space, if there is none), and a hash of the common tokens after it."""


@dataclass(slots=True)
class Prefix:
    """Prompts with the same first block that stored a whole block. `lost_tokens`: computed before, but missed."""

    visits: int = 0
    hit_tokens: int = 0
    lost_tokens: int = 0
    longest: int = 0


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
    before: bytes = b""
    earlier: bytes = b""
    later: bytes = b""


Difference = tuple[Point, Divergence]


@dataclass(slots=True)
class Lists:
    prefixes: OrderedDict[Hash, Prefix] = field(default_factory=OrderedDict)
    divergences: OrderedDict[Point, Divergence] = field(default_factory=OrderedDict)

    def clear(self) -> None:
        self.prefixes.clear()
        self.divergences.clear()

    def visit(self, root: Hash, hit: int, lost: int, length: int) -> None:
        """Count a prompt of `length` tokens that begins with block `root`."""
        prefix = self.prefixes.setdefault(root, Prefix())
        self.prefixes.move_to_end(root)
        prefix.visits += 1
        prefix.hit_tokens += hit
        prefix.lost_tokens += lost
        prefix.longest = max(prefix.longest, length)
        if len(self.prefixes) > MOST:
            self.prefixes.popitem(last=False)

    def differ(self, where: Difference, new: int) -> None:
        """Count a prompt that differs there, with `new` tokens that no prompt had."""
        point, fresh = where
        divergence = self.divergences.setdefault(point, fresh)
        self.divergences.move_to_end(point)
        divergence.times += 1
        divergence.new_tokens += new
        divergence.later = fresh.later
        if len(self.divergences) > MOST:
            self.divergences.popitem(last=False)


def difference(
    blocks: Blocks, chain: Sequence[Hash], tokens: bytes, seen: int, space: Space
) -> Difference | None:
    """Return where a prompt differs from the nearest known one; None if none is near.

    `tokens`: of its first block that no prompt had, after `seen` blocks of its `chain`.
    """
    parent = chain[seen - 1] if seen else None
    shared, other = blocks.nearest(parent, tokens, space)
    if other is None or (parent is None and shared < FEWEST_SHARED):
        return None
    cut, theirs = 4 * shared, blocks.known[other]
    before = (blocks.known[parent].tokens if parent is not None else b"") + tokens[:cut]
    return (space if parent is None else parent, hash(tokens[:cut])), Divergence(
        seen * len(tokens) // 4 + shared,
        theirs.root,
        before=before[-4 * SIDE :],
        earlier=theirs.tokens[cut : cut + 4 * SIDE],
        later=tokens[cut : cut + 4 * SIDE],
    )
