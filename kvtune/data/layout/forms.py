"""How many tokens of a prompt hit, by its length alone: a closed form, if one holds for all that was replayed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

import msgspec

MULTIPLES = (1, 2, 3, 5)
DRAWN = 6


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """max(0, floor((N - spared) / unit) - dropped) x unit tokens of N hit. `lengths`: how many it was held against."""

    unit: int
    dropped: int
    spared: int
    lengths: int

    def hits(self, tokens: int) -> int:
        return max(0, (tokens - self.spared) // self.unit - self.dropped) * self.unit

    @property
    def least(self) -> int:
        """The shortest length of which something hits."""
        return (1 + self.dropped) * self.unit + self.spared

    def text(self, name: str) -> str:
        """Return it in words, `name` for the length: `max(0, floor(N / 1,600) - 1) x 1,600`."""
        length = f"({name} - {self.spared})" if self.spared else name
        times = f"floor({length} / {self.unit:,})"
        times = f"max(0, {times} - {self.dropped})" if self.dropped else times
        return f"{times} x {self.unit:,}; below {self.least:,} tokens nothing hits"


def form_of(replayed: Sequence[tuple[int, int]], units: Sequence[int]) -> Form | None:
    """Return the form that all of these lengths and their hit tokens obey; None if there is none, or more than one.

    `units`: those that are possible: what hashes have, what hits end at, a block.
    """
    forms = (
        Form(unit=unit, dropped=dropped, spared=spared, lengths=len(replayed))
        for unit, dropped, spared in product(sorted(set(units)), (0, 1), (0, 1))
    )
    held = [form for form in forms if all(form.hits(tokens) == hits for tokens, hits in replayed)]
    return held[0] if len(held) == 1 and any(hits for _, hits in replayed) else None


def lengths(block: int, unit: int, longest: int) -> list[int]:
    """Return lengths that tell forms apart: around multiples of the block and of the unit, and some that are drawn."""

    def near() -> Iterator[int]:
        for times in MULTIPLES:
            yield from (times * block - 1, times * block, times * block + 1)
        yield from (block + unit, 2 * block + unit - 1, 3 * block + block // 2)
        drawn = Random(block)
        yield from (drawn.randrange(1, 6 * block) for _ in range(DRAWN))

    return sorted({tokens for tokens in near() if 0 < tokens <= longest})
