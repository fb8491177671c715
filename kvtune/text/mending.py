"""Rewrites prompts as if the text that differs came after the text that is shared. Pure.

A mended prompt has the tokens of the original, in another order: first those that it shares with an earlier prompt, in
that (mended) prompt's order, then those that later prompts share with it, then its own. The earlier prompt is mended,
too: a client that moves a time stamp moves it in every request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtune.text.divergence import Divergence, Ids, Piece
from kvtune.workload.token_ids import Prefixes, packed

Places = NDArray[np.int64]


class _Link(NamedTuple):
    """A prompt's tokens before `at`, and those of `pieces`, are an earlier prompt's, too."""

    like: int
    at: int
    pieces: tuple[Piece, ...] = ()


def mended(
    texts: Iterable[tuple[Sequence[int], Sequence[int]]],
    divergences: Mapping[int, Divergence],
    chosen: Collection[int],
) -> list[Ids]:
    """Return the prompts of (prompt, answer) pairs in the log's order, mended for the divergences of `chosen`."""
    pairs = list(texts)
    links = _links(pairs, {number: divergences[number] for number in chosen if number in divergences})
    shared = _shared(pairs, links)
    orders: dict[int, Places] = {}
    prompts: list[Ids] = []
    for number, (prompt, answer) in enumerate(pairs):
        size = len(prompt)
        link = links.get(number)
        first = _in_order_of(link, orders[link.like], size) if link is not None else np.empty(0, np.int64)
        kept = shared.get(number, np.zeros(size, dtype=bool))[:size]
        rest = np.ones(size, dtype=bool)
        rest[first] = False
        order = np.concatenate([first, np.flatnonzero(rest & kept), np.flatnonzero(rest & ~kept)])
        orders[number] = np.concatenate([order, np.arange(size, size + max(0, len(answer) - 1))])
        prompts.append(np.asarray(prompt, dtype=np.uint32)[order])
    return prompts


def _links(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], wanted: Mapping[int, Divergence]
) -> dict[int, _Link]:
    """Link each prompt to the earlier one that it differs from, or else to one with which it begins alike."""
    links: dict[int, _Link] = {}
    known: Prefixes[int] = Prefixes()
    for number, (prompt, answer) in enumerate(pairs):
        tokens = packed(prompt)
        if (one := wanted.get(number)) is not None:
            links[number] = _Link(one.like, one.at, one.pieces)
        else:
            seen, like = known.longest(tokens)
            if like is not None and seen:
                links[number] = _Link(like, seen)
        known.add(tokens + packed(answer[:-1]), number)
    return links


def _shared(
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]], links: Mapping[int, _Link]
) -> dict[int, NDArray[np.bool_]]:
    """Return, for each request that later ones are linked to, which of its tokens one of these has, too."""
    shared: dict[int, NDArray[np.bool_]] = {}
    for link in links.values():
        prompt, answer = pairs[link.like]
        has = shared.setdefault(link.like, np.zeros(len(prompt) + len(answer), dtype=bool))
        has[: link.at] = True
        for piece in link.pieces:
            has[piece.old : piece.old + piece.length] = True
    return shared


def _in_order_of(link: _Link, order: Places, size: int) -> Places:
    """Return the positions of a prompt's tokens that the earlier prompt has, in the order in which that was mended."""
    here = np.full(int(order.max(initial=-1)) + 1, -1, dtype=np.int64)
    at = min(link.at, len(here))
    here[:at] = np.arange(at)
    for piece in link.pieces:
        end = min(piece.old + piece.length, len(here))
        here[piece.old : end] = np.arange(piece.new, piece.new + end - piece.old)
    found = here[order]
    found = found[(found >= 0) & (found < size)]
    return found[np.sort(np.unique(found, return_index=True)[1])]
