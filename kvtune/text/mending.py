"""Rewrites prompts as if the text that differs came after the text that is shared. Pure.

A mended prompt begins like the (mended) earlier one, up to the last token that both have; its own text follows. So it
also holds text that only the earlier prompt had (`foreign`). A client that mends its prompts does not send that text:
counts are over a prompt's own tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtune.text.divergence import Divergence, Ids


@dataclass(frozen=True, slots=True)
class Mended:
    """A mended prompt. `places`: for each of its tokens the position in the original prompt; -1: foreign text."""

    ids: Ids
    places: NDArray[np.int64]

    @property
    def foreign(self) -> int:
        return int((self.places < 0).sum())

    def own_hits(self, hit: int) -> int:
        """Count the original prompt's tokens among the first `hit` tokens."""
        return int((self.places[:hit] >= 0).sum())


def mended(
    texts: Iterable[tuple[Sequence[int], Sequence[int]]],
    divergences: Mapping[int, Divergence],
    chosen: Collection[int],
    longest: Sequence[int] = (),
) -> list[Mended]:
    """Return the prompts of (prompt, answer) pairs in the log's order; those of `chosen` requests are mended.

    A prompt that would be longer than the entry of its request in `longest` (empty: no limit) stays as it is.
    """
    done: list[tuple[Ids, NDArray[np.int64]]] = []
    prompts: list[Mended] = []
    for number, (prompt, answer) in enumerate(texts):
        ids = np.asarray(prompt, dtype=np.uint32)
        computed = np.asarray(answer[:-1], dtype=np.uint32)
        one = divergences.get(number) if number in chosen else None
        if one is None:
            new, places = ids, np.arange(len(ids))
        else:
            new, places = _mended(one, ids, *done[one.like])
            if longest and len(new) > longest[number]:
                new, places = ids, np.arange(len(ids))
        prompts.append(Mended(new, places))
        answers = len(ids) + np.arange(len(computed))
        done.append((np.concatenate([new, computed]), np.concatenate([places, answers])))
    return prompts


def _mended(one: Divergence, ids: Ids, like: Ids, places: NDArray[np.int64]) -> tuple[Ids, NDArray[np.int64]]:
    """Return a mended prompt, and for each of its tokens the position in the original prompt (-1: none).

    `like`, `places`: the mended earlier text, and its tokens' positions in the original earlier text.
    """
    here = np.full(int(places.max(initial=0)) + 1, -1, dtype=np.int64)
    here[: one.at] = np.arange(one.at)
    for piece in one.pieces:
        here[piece.old : piece.old + piece.length] = np.arange(piece.new, piece.new + piece.length)
    found = np.where(places >= 0, here[places], -1)
    shared = np.flatnonzero(found >= 0)
    end = int(shared[-1]) + 1 if len(shared) else 0
    rest = np.ones(len(ids), dtype=bool)
    rest[found[:end][found[:end] >= 0]] = False
    left = np.flatnonzero(rest)
    return np.concatenate([like[:end], ids[left]]), np.concatenate([found[:end], left])
