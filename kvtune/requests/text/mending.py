"""Rewrites prompts as if the text that differs came after the text that is shared. Pure.

A mended prompt has the tokens of the original, in another order: the text of the chosen changes comes last, where a
client would put it, in each prompt that has it: also in the earlier prompt, in those that this one begins like, and in
those that go on from it. Parts in another order take the order of the earlier prompt; then come those that later ones
share, then its own. All else stays: what comes after a change that is not mended is not shared, as in the client's own
prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtune.requests.log.token_ids import Prefixes, packed
from kvtune.requests.text.changes import Change
from kvtune.requests.text.divergence import Divergence, Ids, Piece

Places = NDArray[np.int64]
Marked = NDArray[np.bool_]
Texts = Sequence[tuple[Sequence[int], Sequence[int]]]


class _Link(NamedTuple):
    """A prompt's tokens before `at`, and those of `pieces`, are an earlier prompt's, too.

    `mended`, `left`: the changes between the two that are mended, and those that are not.
    """

    like: int
    at: int
    pieces: tuple[Piece, ...] = ()
    mended: tuple[Change, ...] = ()
    left: tuple[Change, ...] = ()


def mended(
    texts: Iterable[tuple[Sequence[int], Sequence[int]]],
    divergences: Mapping[int, Divergence],
    changes: Mapping[int, Sequence[Change]],
    chosen: Mapping[int, Collection[int]],
    ends: Mapping[int, int] | None = None,
) -> list[Ids]:
    """Return the prompts of (prompt, answer) pairs in the log's order, mended for the `chosen` changes.

    `chosen`: positions among a request's `changes`. `ends`: how many of a prompt's last tokens come after its last
    message; text is moved before these.
    """
    pairs = list(texts)
    links = _links(pairs, divergences, changes, chosen)
    moved = _moved(pairs, links)
    kept = _kept(pairs, links)
    orders: list[Places] = []
    prompts: list[Ids] = []
    for number, (prompt, answer) in enumerate(pairs):
        size = len(prompt)
        link = links.get(number)
        first = np.empty(0, np.int64)
        if link is not None:
            first = _in_order_of(link, orders[link.like], moved[link.like], moved[number][:size])
        rest = np.ones(size, dtype=bool)
        rest[first] = False
        away = moved[number][:size] & rest
        last = np.arange(size) >= size - (ends or {}).get(number, 0)
        stays = rest & ~away & ~last
        early = kept[number][:size] if number in kept else stays
        parts = (stays & early, stays & ~early, away, rest & ~away & last)
        order = np.concatenate([first, *map(np.flatnonzero, parts)])
        orders.append(np.concatenate([order, np.arange(size, size + max(0, len(answer) - 1))]))
        prompts.append(np.asarray(prompt, dtype=np.uint32)[order])
    return prompts


def _links(
    pairs: Texts,
    divergences: Mapping[int, Divergence],
    changes: Mapping[int, Sequence[Change]],
    chosen: Mapping[int, Collection[int]],
) -> dict[int, _Link]:
    """Link each prompt to the earlier one that it differs from, or else to one with which it begins alike."""
    links: dict[int, _Link] = {}
    prefixes: Prefixes[int] = Prefixes()
    for number, (prompt, answer) in enumerate(pairs):
        tokens = packed(prompt)
        if (divergence := divergences.get(number)) is not None:
            wanted = chosen.get(number, ())
            sides: tuple[list[Change], list[Change]] = [], []
            for nth, change in enumerate(changes.get(number, ())):
                sides[nth not in wanted].append(change)
            links[number] = _Link(
                divergence.like, *_held(divergence, sides[0]), tuple(sides[0]), tuple(sides[1])
            )
        else:
            seen, like = prefixes.longest(tokens)
            if like is not None and seen:
                links[number] = _Link(like, seen)
        prefixes.add(tokens + packed(answer[:-1]), number)
    return links


def _held(divergence: Divergence, mended_: Sequence[Change]) -> tuple[int, tuple[Piece, ...]]:
    """Return what both prompts have: of parts in another order that are mended, the parts."""
    place, pieces = divergence.at, list(divergence.pieces)
    for change in mended_:
        if change.pieces:
            start, end = change.new
            place = min(place, start)
            outside = [
                Piece(low, piece.old + low - piece.new, high - low)
                for piece in (*pieces, Piece(place, place, divergence.at - place))
                for low, high in (
                    (piece.new, min(piece.new + piece.length, start)),
                    (max(piece.new, end), piece.new + piece.length),
                )
                if high > low
            ]
            pieces = sorted([*outside, *change.pieces])
    return place, tuple(pieces)


def _moved(pairs: Texts, links: Mapping[int, _Link]) -> list[Marked]:
    """Mark the tokens of each prompt (and answer) that are moved, in all prompts that have the same text there."""
    moved = [np.zeros(len(prompt) + max(0, len(answer) - 1), dtype=bool) for prompt, answer in pairs]
    for number, link in links.items():
        for change in link.mended:
            if not change.orders:
                moved[link.like][slice(*change.old)] = True
                moved[number][slice(*change.new)] = True
    if not any(link.mended for link in links.values()):
        return moved
    for number in sorted(links, reverse=True):
        new, old = _shared(links[number])
        marks = moved[number]
        inside = new < len(marks)
        moved[links[number].like][old[inside][marks[new[inside]]]] = True
    for number in sorted(links):
        new, old = _shared(links[number])
        inside = new < len(moved[number])
        moved[number][new[inside][moved[links[number].like][old[inside]]]] = True
    return moved


def _kept(pairs: Texts, links: Mapping[int, _Link]) -> dict[int, Marked]:
    """Mark which tokens later prompts share, in each prompt whose parts are put in order."""
    kept: dict[int, Marked] = {}
    for number, link in links.items():
        if link.left or not any(change.orders for change in link.mended):
            continue
        for request in (number, link.like):
            if request not in kept:
                prompt, answer = pairs[request]
                kept[request] = np.zeros(len(prompt) + max(0, len(answer) - 1), dtype=bool)
    for link in links.values():
        if (marks := kept.get(link.like)) is not None:
            _, old = _shared(link)
            marks[old[old < len(marks)]] = True
    return kept


def _shared(link: _Link) -> tuple[Places, Places]:
    """Return the places of the tokens that both prompts have: in this prompt, and in the earlier one."""
    spans = [(0, 0, link.at), *link.pieces]
    new, old = (
        np.concatenate([np.arange(span[side], span[side] + span[2]) for span in spans]) for side in (0, 1)
    )
    return new, old


def _in_order_of(link: _Link, order: Places, gone: Marked, moved: Marked) -> Places:
    """Return the places of a prompt's first tokens that the earlier prompt has, in the order in which that was mended.

    They end where one of the two has a token that the other has not and that is not moved, and at a change that is
    left. `gone`, `moved`: the tokens that are moved, of the earlier prompt and of this one.
    """
    new, old = _shared(link)
    places = np.full(len(gone), -1, dtype=np.int64)  # of the earlier prompt's tokens, in this prompt
    inside = old < len(places)
    places[old[inside]] = new[inside]
    expected, away, own = moved.copy(), gone.copy(), np.zeros(len(moved), dtype=bool)
    expected[new[new < len(expected)]] = True
    for change in link.mended:
        expected[slice(*change.new)] |= change.orders
        away[slice(*change.old)] |= change.orders
        own[slice(*change.new)] = not change.orders
    end_new = min([_first(~expected), *(change.new[0] for change in link.left)])
    end_old = min([len(gone), *(change.old[0] for change in link.left)])
    shared = places[order]
    shared = shared[: _first(~away[order] & ((shared < 0) | (shared >= end_new) | (order >= end_old)))]
    shared = shared[(shared >= 0) & ~own[np.maximum(shared, 0)]]
    once: Places = shared[np.sort(np.unique(shared, return_index=True)[1])]
    return once


def _first(marks: Marked) -> int:
    """Return the first marked place, or the end."""
    return int(marks.argmax()) if marks.any() else len(marks)
