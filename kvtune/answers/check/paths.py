"""The ways to a hit that a server can show: how each is made, and what proves that it was taken. Pure.

Each path has another cache_salt. Its primers fill the cache, then the prompt is asked, whose cold answer is known.
What its answer says of cached tokens proves the path: at least `least`, and at most `most`, which the primers left.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import NamedTuple

import msgspec

CONSONANTS = "bdfgklmnprstvz"
LEAST_TOKENS = 400
ENDS = 40
"""Tokens at a prompt's end that no primer has."""


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What decides where hits end, in tokens; 0 if not known. `blocks`: of groups and of hits in parts, smallest first.

    `tier`: whether the server has a KV connector.
    """

    blocks: list[int]
    window: int = 0
    pool: int = 0
    longest: int = 0
    tier: bool = False


class Prompt(NamedTuple):
    number: int
    ids: list[int]


COLD = {"null": "cold again", "exchanged": "one block exchanged"}
PATHS = {
    "whole": "the same prompt again",
    "inside": "a hit that ends inside a block",
    "shortest": "the shortest hit",
    "junction": "behind a junction of two prompts",
    "edge": "at a window's edge",
    "turn": "behind an answer in the cache",
    "full": "in a full pool, after evictions",
    "tier": "from a tier alone",
    "mixed": "part local, part from a tier",
}
TIER = ("tier", "mixed")
"""Before these the cache is emptied, and a connector must load."""
FILLED = ("full", *TIER)


class Way(NamedTuple):
    """A path of one prompt. `later`: primers after the cache was cleared. `turn`: the primer's answer is part of it.

    `ids`: the tokens that are sent, if they are not the prompt.
    """

    primers: Sequence[Sequence[int]] = ()
    later: Sequence[Sequence[int]] = ()
    least: int = 1
    most: int = 1 << 40
    turn: bool = False
    ids: Sequence[int] = ()


def why_not(name: str, layout: Layout, fill: bool) -> str:
    """Say why a server cannot show a path."""
    if name == "edge" and not layout.window:
        return "no window is known: the model has none, or its config.json is not on this machine"
    if name in TIER and not layout.tier:
        return "the server has no KV connector"
    if name in FILLED and not (fill and layout.pool):
        return f"only with --fill: it evicts all that the server holds, {layout.pool:,} tokens"
    return ""


def way(name: str, layout: Layout, prompt: Prompt, other: Prompt, tokens: int) -> Way:
    """Return how a path leads to a prompt. `other`: a prompt for what a primer goes on with."""
    ids, number, small, block = prompt.ids, prompt.number, layout.blocks[0], layout.blocks[-1]
    least = max(1, len(ids) * 3 // 4 // block * block - min(tokens // 2, block // 2))
    near = layout.window // small * small + (1 - small, 1, small + 1, 2 * small)[number % 4]
    edge = min(max(small + 1, near), len(ids) - ENDS)
    shortest = block + 3
    block = layout.blocks[number % len(layout.blocks)] if name == "inside" else block
    begin = len(ids) * (2 + number % 2) // 4 // block * block
    end = begin + (block // 2 + 1, min(5, block - 1), block - min(9, block // 3))[number % 3]
    long = parted(layout, prompt, end, other, 2 * block)
    early = [parted(layout, prompt, edge, other, count) for count in (2, small // 2)]
    ways = {
        "null": Way(least=0, most=0),
        "exchanged": Way(least=0, most=0, ids=exchanged(layout, prompt, other)),
        "inside": Way([parted(layout, prompt, end, other, max(1, block // 8))], most=end),
        "shortest": Way([parted(layout, prompt, shortest, other, 2)], most=shortest),
        "junction": Way([long[: end + block], [*long[: end + 1], *reversed(long[end + 1 :])]], most=end),
        "edge": Way(early, most=edge),
        "turn": Way([ids[:least]], least=least + 1, turn=True),
        "mixed": Way([ids, ids], [parted(layout, prompt, end, other, 2)], least=begin + 1),
    }
    return ways.get(name, Way([ids, ids]))


def parted(layout: Layout, prompt: Prompt, end: int, other: Prompt, count: int) -> list[int]:
    """Return the prompt's tokens up to `end`, and then `count` of another, of which the first differs."""
    rest, end = other.ids, min(end, len(prompt.ids) - ENDS)
    count = min(count, layout.longest - end - 2) if layout.longest else count
    start = next(i for i in range(end % 89, len(rest)) if rest[i] != prompt.ids[end])
    return [*prompt.ids[:end], *(rest[start:] + rest)[:count]]


def exchanged(layout: Layout, prompt: Prompt, other: Prompt) -> list[int]:
    """Return the prompt with one block's tokens exchanged for another prompt's: what a wrong block would give."""
    block = layout.blocks[0]
    start = len(prompt.ids) * (1 + prompt.number % 3) // 4 // block * block
    return [*prompt.ids[:start], *other.ids[start : start + block], *prompt.ids[start + block :]]


def length(layout: Layout, number: int) -> int:
    """Return a prompt's length: three blocks and more, longer than a window, and each ends elsewhere in a block."""
    block = layout.blocks[-1]
    least = max(LEAST_TOKENS, 3 * block + block // 2, layout.window + 3 * block)
    wanted = least + number * 37 % max(64, block)
    return min(wanted, layout.longest - 4 * ENDS) if layout.longest else wanted


def records(draw: Random, count: int) -> list[tuple[str, int]]:
    """Return a register's lines up to the number that each says, and the numbers; no line is like another."""
    names = ("".join(draw.choice(CONSONANTS) + draw.choice("aeiou") for _ in range(4)) for _ in range(count))
    return [(f"The code of {name.capitalize()} is", draw.randrange(10_000, 99_999)) for name in names]
