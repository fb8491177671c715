"""The edits between a prompt and the earlier one from which it diverges, in tokens. Pure.

The text of both prompts is cut into edits (`edits.py`), and each edit is found among the tokens. Without text the
pieces that both prompts have tell the edits: all that stands between two pieces, or the pieces' other order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvtune.requests.text.decoded import Decoded
from kvtune.requests.text.divergence import Divergence, Piece
from kvtune.requests.text.edits import LEAST, Edit, Span, between

ORDERS = ("tools", "examples", "documents", "keys", "order")
"""Kinds of edits that are mended by one order of the parts. Of the others the text is moved behind what is shared."""
MERGED = 4
"""Tokens before a difference that a tokenizer may cut in another way because of it."""
UNKNOWN = Edit("other", "", "", 0, "", "", "", (0, 0), (0, 0))


@dataclass(frozen=True, slots=True)
class Change:
    """An edit in tokens. `at`: the first whose id differs; its text may begin before. `old`, `new`: what a client would
    move, in either prompt.

    `after`: tokens after it that the earlier prompt has, too, and that no other prompt has from its start. `pieces`: of
    parts in another order, those that both prompts have.
    """

    edit: Edit
    at: int
    old: Span
    new: Span
    after: int
    pieces: tuple[Piece, ...] = ()

    @property
    def orders(self) -> bool:
        """Whether it is mended by an order of what both prompts have, as parts are and texts that are not known."""
        return self.edit.kind in ORDERS or not self.edit.place


class Both(NamedTuple):
    """The text of the earlier prompt, and of this one."""

    old: Decoded
    new: Decoded


def changes_of(divergence: Divergence, texts: Both | None) -> tuple[Change, ...]:
    """Return the changes by which a prompt diverges, in its order; none if less than `LEAST` text follows."""
    if texts is not None:
        changes = []
        for edit in between(texts.old.parts, texts.new.parts):
            here = _tokens(edit.new_span, texts.new)
            after = _after(divergence, here[edit.kind not in ORDERS])
            if after:
                moved = edit.moved or (edit.old_span, edit.new_span)
                old, new = _tokens(moved[0], texts.old), _tokens(moved[1], texts.new)
                pieces = _same_lines(texts, moved) if edit.kind in ORDERS else ()
                changes.append(Change(edit, _first(edit, texts), old, new, after, pieces))
        if changes or _shared_text(divergence, texts.new) < LEAST:
            return tuple(changes)
    return _of_pieces(divergence)


def _shared_text(divergence: Divergence, text: Decoded) -> int:
    """Count the characters of the pieces that no other prompt has from its start."""
    spans = [(max(divergence.seen, piece.new), piece.new + piece.length) for piece in divergence.pieces]
    return sum(text.starts[end] - text.starts[start] for start, end in spans if end > start)


def _of_pieces(divergence: Divergence) -> tuple[Change, ...]:
    """Return what stands between the pieces, without its text."""
    start, pieces = divergence.at, divergence.pieces
    if divergence.reordered:
        old = start, max(piece.old + piece.length for piece in pieces)
        new = start, pieces[-1].new + pieces[-1].length
        return (Change(replace(UNKNOWN, kind="order"), start, old, new, divergence.after),)
    ends = [(start, start), *((piece.old + piece.length, piece.new + piece.length) for piece in pieces)]
    gaps = [
        ((old, max(old, piece.old)), (new, piece.new))
        for (old, new), piece in zip(ends, pieces, strict=False)
        if piece.new >= divergence.seen
    ]
    return tuple(
        Change(UNKNOWN, new[0], old, new, _after(divergence, new[1]))
        for old, new in gaps or [((start, start), (start, pieces[0].new))]
    )


def _same_lines(texts: Both, moved: tuple[Span, Span]) -> tuple[Piece, ...]:
    """Return the lines in another order that both prompts have, as pieces of tokens."""
    was: dict[str, list[Span]] = {}
    for line, span in _lines(texts.old, moved[0]):
        was.setdefault(line, []).append(span)
    pieces = []
    for line, (start, end) in _lines(texts.new, moved[1]):
        if same := was.get(line):
            first, last = same.pop(0)
            if last - first == end - start:
                pieces.append(Piece(start, first, end - start))
    return tuple(pieces)


def _lines(text: Decoded, span: Span) -> Iterator[tuple[str, Span]]:
    """Yield the lines of a text, each with its tokens; those that begin or end inside a token are left out."""
    place = span[0]
    for line in text.text[slice(*span)].splitlines(keepends=True):
        tokens = bisect_left(text.starts, place), bisect_left(text.starts, place + len(line))
        if text.starts[tokens[0]] == place and text.starts[tokens[1]] == place + len(line):
            yield line, tokens
        place += len(line)


def _first(edit: Edit, texts: Both) -> int:
    """Return the first token of the edit whose id differs: an equal text may have other tokens before another one."""
    (old, was), (new, now) = (edit.old_span[0], texts.old), (edit.new_span[0], texts.new)
    here = bisect_right(now.starts, new) - 1
    for start in range(max(0, here - MERGED), here + 1):
        back = new - now.starts[start]
        there = bisect_left(was.starts, old - back)
        if was.starts[there] == old - back and was.text[old - back : old] == now.text[new - back : new]:
            most = min(len(was.ids) - there, len(now.ids) - start)
            return start + next((n for n in range(most) if was.ids[there + n] != now.ids[start + n]), most)
    return here


def _tokens(span: Span, text: Decoded) -> Span:
    """Return the tokens that have a character of this text; those of an empty one are none."""
    start, end = span
    first = bisect_right(text.starts, start) - 1
    return first, max(first, bisect_left(text.starts, end)) if end > start else first


def _after(divergence: Divergence, place: int) -> int:
    """Count the tokens from `place` on that stand in a piece, and that no other prompt has from its start."""
    place = max(place, divergence.seen)
    return sum(max(0, piece.new + piece.length - max(place, piece.new)) for piece in divergence.pieces)
