"""How many idle conversations a pool keeps so that each still hits when it is sent again. Arithmetic only.

What one conversation keeps is measured (`kvtune/lab/sim/idle.py`); an LRU queue decides the rest:

    sent once      each takes `most` blocks while it runs, and leaves `kept` with hashes behind it
    evicted first  the oldest conversation's blocks, from its end; its first `spare` ones are not needed for its hit
    sent again     each takes `again_most`, its own blocks included, and leaves `again_kept`
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


class Idle(msgspec.Struct, frozen=True, kw_only=True):
    """What an idle conversation of `prompt_tokens` keeps in the cache, by vLLM's own scheduler.

    `hit_tokens`: what it hits when it is sent again. `blocks`: what it keeps in each group. `running_blocks`: the most
    blocks that it takes while it is computed, with those. `conversations`: how many of them a pool keeps, sent one
    after another with nothing else running; None: the pool's size is unknown.
    """

    prompt_tokens: int
    hit_tokens: int
    blocks: list[int]
    running_blocks: int
    conversations: int | None

    @property
    def tokens(self) -> int | None:
        """Return the tokens of idle conversation that stay hittable."""
        return None if self.conversations is None else self.conversations * self.hit_tokens


@dataclass(frozen=True, slots=True)
class Footprint:
    """Blocks of the pool that one conversation takes and leaves, sent once and then again. See the module."""

    kept: int
    spare: int
    most: int
    again_most: int
    again_kept: int


def conversations_kept(footprint: Footprint, usable: int) -> int:
    """Return the largest N of which `usable` blocks keep all: N sent one after another, then each again, all hit."""
    number = max(0, usable // max(1, footprint.kept - footprint.spare))
    while number and needed(footprint, number) > usable:
        number -= 1
    return number


def needed(footprint: Footprint, number: int) -> int:
    """Return the blocks that a pool must have for `number` conversations."""
    kept, spare = footprint.kept, footprint.spare
    wanted = kept - spare
    last_sent = wanted + (number - 2) * kept + footprint.most if number > 1 else footprint.most
    if number < 2:
        return last_sent
    growth = max(0, footprint.again_kept - spare - kept)  # what each leaves more once it was sent again
    again = (number - 2) * (kept + growth) + wanted + max(footprint.again_most - spare, wanted)
    return max(last_sent, again)
