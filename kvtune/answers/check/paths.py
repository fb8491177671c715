"""The ways to a hit that a server can show: how each is made, and what proves that it was taken. Pure.

A path has a cache_salt of its own: its primers fill the cache, then the prompt is asked, whose cold answer is known.
What its answer says of cached tokens proves the path: more than `least`, and at most `most`, which the primers left.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

PLACES = ("harbour", "mill", "station", "quarry", "bridge", "garden", "library", "foundry", "market", "tower")
THINGS = ("copper", "salt", "timber", "glass", "barley", "wool", "amber", "paper", "slate", "honey", "resin")
LEAST_TOKENS = 400
ENDS = 40
"""Tokens at a prompt's end that no primer has."""
FULL, EMPTY, RESTART = "full", "empty", "restart"


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """What decides where hits end, in tokens; 0 if not known. `blocks`: of groups and of hits in parts, smallest first.

    `tier`: whether the server has a KV connector.
    """

    blocks: list[int]
    window: int = 0
    pool: int = 0
    longest: int = 0
    tier: bool = False


class Prompt(msgspec.Struct, frozen=True):
    number: int
    ids: Annotated[list[int], Meta(min_length=2 * ENDS)]


class Path(NamedTuple):
    """`clears`: what happens between primers and prompts. `loads`: a connector must load a part of the hit."""

    title: str
    clears: str = ""
    loads: bool = False


PATHS = {
    "whole": Path("the same prompt again"),
    "inside": Path("a hit that ends inside a block"),
    "shortest": Path("the shortest hit"),
    "junction": Path("behind a junction of two prompts"),
    "edge": Path("at a window's edge"),
    "turn": Path("behind an answer in the cache"),
    "full": Path("in a full pool, after evictions", FULL),
    "tier": Path("from a tier alone", EMPTY, loads=True),
    "mixed": Path("part local, part from a tier", EMPTY, loads=True),
}
RESTARTED = {"restart": Path("from a tier, after a restart", RESTART, loads=True)}


class Way(NamedTuple):
    """A path of one prompt. `later`: primers after the cache was cleared. `turn`: the primer's answer is part of it."""

    primers: Sequence[Sequence[int]]
    later: Sequence[Sequence[int]] = ()
    least: int = 0
    most: int = 1 << 40
    turn: bool = False


def why_not(name: str, path: Path, layout: Layout, fill: bool) -> str:
    """Say why a server cannot show a path."""
    if name == "edge" and not layout.window:
        return "no window is known: the model has none, or its config.json is not on this machine"
    if path.loads and not layout.tier:
        return "the server has no KV connector"
    if path.clears in (FULL, EMPTY) and not (fill and layout.pool):
        return f"only with --fill: it evicts all that the server holds, {layout.pool:,} tokens"
    return ""


def way(name: str, layout: Layout, prompt: Prompt, other: Prompt, tokens: int) -> Way:
    """Return how a path leads to a prompt. `other`: a prompt for what a primer goes on with."""
    ids, number, small, block = prompt.ids, prompt.number, layout.blocks[0], layout.blocks[-1]
    if name == "shortest":
        return Way([parted(layout, prompt, block + 3, other, 2)], most=block + 3)
    if name == "turn":
        end = max(1, len(ids) * 3 // 4 // block * block - min(tokens // 2, block // 2))
        return Way([ids[:end]], least=end, turn=True)
    if name == "edge":
        near = layout.window // small * small + (1 - small, 1, small + 1, 2 * small)[number % 4]
        end = min(max(small + 1, near), len(ids) - ENDS)
        return Way(
            [parted(layout, prompt, end, other, 2), parted(layout, prompt, end, other, small // 2)], most=end
        )
    if name == "inside":
        block = layout.blocks[number % len(layout.blocks)]
    begin = len(ids) * (2 + number % 2) // 4 // block * block
    end = begin + (block // 2 + 1, min(5, block - 1), block - min(9, block // 3))[number % 3]
    if name == "inside":
        return Way([parted(layout, prompt, end, other, max(1, block // 8))], most=end)
    if name == "junction":
        long = parted(layout, prompt, end, other, 2 * block)
        return Way([long[: end + block], [*long[: end + 1], *reversed(long[end + 1 :])]], most=end)
    if name == "mixed":
        return Way([ids, ids], [parted(layout, prompt, end, other, 2)], least=begin)
    return Way([ids, ids])


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
    wanted = max(LEAST_TOKENS, 3 * block + block // 2, layout.window + 3 * block) + number * 37 % max(
        64, block
    )
    return min(wanted, layout.longest - 4 * ENDS) if layout.longest else wanted


def records(draw: Random, count: int) -> list[tuple[str, int]]:
    """Return a register's lines up to the number that each says, and the numbers; no line is like another."""
    lines = []
    for _ in range(count):
        name = "".join(draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(3)).capitalize()
        start = f"In the {draw.choice(PLACES)} of {name} lies {draw.choice(THINGS)}; the code of {name} is"
        lines.append((start, draw.randrange(10_000, 99_999)))
    return lines
