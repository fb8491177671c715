"""The ways to a hit that a server can show: how each is made, and what proves that it was taken. Pure.

Each path has another cache_salt. Its primers fill the cache, then the prompt is asked, whose cold answer is known.
The answer's `cached_tokens` prove the path: the primers left that many in the pool or in a tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle, islice
from typing import NamedTuple

import msgspec

LEAST_TOKENS, CHUNK = 400, 2048
"""The least length of a prompt, and the one beyond which most servers compute it in several steps."""
ANY, ENDS, KERNEL = 1 << 40, 40, 64
"""More tokens than any prompt has; those at its end that no primer has; what a kernel of states computes together."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What decides where hits end, in tokens; 0 if not known. `blocks`: of groups and of hits in parts, smallest first.

    `tier`: whether the server has a KV connector.
    """

    blocks: list[int]
    window: int = 0
    pool: int = 0
    longest: int = 0
    tier: bool = False


COLD = ("null", "exchanged")
PATHS = {
    "null": "cold again",
    "exchanged": "one block exchanged",
    "kept": "kept by a tier since FILE was made",
    "whole": "the same prompt again",
    "inside": "a hit that ends inside a block",
    "shortest": "the shortest hit",
    "junction": "behind a junction of two prompts",
    "edge": "at a window's edge",
    "turn": "behind an answer in the cache",
    "long": "a prompt of several chunks",
    "full": "in a full pool, after evictions",
    "tier": "from a tier alone",
    "mixed": "part local, part from a tier",
}
TIER, FILLED = {"kept": False, "tier": False, "mixed": True}, ("full", "tier", "mixed")
"""On these a connector must load: all, or a part (True); before these the pool is filled, or emptied."""


class Way(NamedTuple):
    """A path of one prompt: what is sent, and how much of it hits. `later`: primers after the cache was cleared."""

    ids: Sequence[int]
    primers: Sequence[Sequence[int]] = ()
    hits: range = range(1, ANY)
    later: Sequence[Sequence[int]] = ()


def why_not(name: str, layout: Layout, kept: Sequence[str], fill: bool) -> str:
    """Say why a server cannot show a path. `kept`: salts of an earlier check."""
    if name == "kept" and not all(kept):
        return "only with --replay FILE, of a check that primed this tier"
    if name == "edge" and not layout.window:
        return "no window is known: the model has none, or its config.json is not on this machine"
    if name == "long" and 0 < layout.longest < CHUNK + 2 * layout.blocks[-1] + ENDS:
        return f"the server takes at most {layout.longest:,} tokens"
    if name in TIER and name != "kept" and not layout.tier:
        return "the server has no KV connector"
    if name in FILLED and not (fill and layout.pool):
        evicts = f"only with --fill: it evicts all that the server holds, {layout.pool:,} tokens"
        return evicts if layout.pool else "the server does not say how large its pool is"
    return ""


def way(name: str, layout: Layout, prompts: Sequence[list[int]], number: int, tokens: int) -> Way:
    """Return how a path leads to a prompt; its primers go on as the prompt before it."""
    ids, other, small, block = prompts[number], prompts[number - 1], layout.blocks[0], layout.blocks[-1]

    def part(end: int, count: int) -> list[int]:
        """Return the prompt's tokens up to `end`, and then `count` of another, of which the first differs."""
        end = min(end, len(ids) - ENDS)
        start = next((i for i in range(end % 89, len(other)) if other[i] != ids[end]), 0)
        return [*ids[:end], *(other[start:] + other)[:count]][: (layout.longest or ANY) - 2]

    least = max(1, len(ids) * 3 // 4 // block * block - min(tokens // 2, block // 2))
    edge = max(small + 1, layout.window // small * small + (1 - small, 1, small + 1, 2 * small)[number % 4])
    block = layout.blocks[number % len(layout.blocks)] if name == "inside" else block
    begin = len(ids) * (2 + number % 2) // 4 // block * block
    end = begin + (block // 2 + 1, min(5, block - 1), block - min(9, block // 3))[number % 3]
    behind, hits = part(end, 2 * block), range(1, end + 1)
    start = len(ids) * (1 + number % 3) // 4 // small * small
    more = CHUNK + block + number * 37 % block - len(ids)
    long = [*islice(cycle(chain.from_iterable(prompts)), 1, max(0, more) + 1), *ids]  # no prompt begins it
    ways = {
        "exchanged": Way([*ids[:start], *other[start : start + small], *ids[start + small :]], hits=range(1)),
        "kept": Way(ids),
        "inside": Way(ids, [part(end, max(1, block // 8))], hits),
        "shortest": Way(ids, [part(block + 3, 2)], range(1, block + 4)),
        "junction": Way(ids, [behind[: end + block], [*behind[: end + 1], *behind[:end:-1]]], hits),
        "edge": Way(ids, [part(edge, 2), part(edge, small // 2)], range(1, edge + 1)),
        "turn": Way(ids, [ids[:least]], range(least + 1, ANY)),
        "long": Way(long, [long, long]),
        "mixed": Way(ids, [ids, ids], range(begin + 1, ANY), [part(end, 2)]),
    }
    return ways.get(name, Way(ids, [ids, ids]))


def length(layout: Layout, number: int) -> int:
    """Return a prompt's length: three blocks and more, longer than a window, and each ends elsewhere in a block."""
    block = layout.blocks[-1]
    least = max(LEAST_TOKENS, 3 * block + block // 2, layout.window + 3 * block)
    return min(least + number * 37 % max(64, block), (layout.longest or ANY) - 4 * ENDS)
