"""Text of token ids, with the place of each token in it. Pure, except for the function that decodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from kvtune.requests.text.parts import Part, of_text

TextOf = Callable[[Sequence[int]], str]
CLOSING = 24
"""Tokens at the end of a prompt among which the marks after its last message are."""
_CLOSE = re.compile(r"(?:\s*(?:</?[^<>\s]{1,40}>|\[/INST\])\s*(?:assistant|model)?\s*)+\Z")
PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""What a token is decoded to that has only some bytes of a character."""


@dataclass(frozen=True)
class Decoded:
    """A prompt's text. `pieces`: of each token; together they are the text. `ids`: the tokens."""

    text: str
    pieces: Sequence[str]
    ids: Sequence[int]

    @cached_property
    def parts(self) -> list[Part]:
        return of_text(self.text)

    @cached_property
    def starts(self) -> list[int]:
        """Where each token begins, and where the last one ends."""
        return list(accumulate(map(len, self.pieces), initial=0))


def closing(text: Decoded) -> int:
    """Count the tokens at the end of a prompt that come after its last message."""
    match = _CLOSE.search(text.text)
    return sum(start >= match.start() for start in text.starts[:-1]) if match else 0


class Decoder:
    """Decodes prompts token by token, and asks once for each token's text."""

    def __init__(self, text: TextOf) -> None:
        self._text = text
        self._pieces: dict[int, str] = {}
        self._partial: set[int] = set()

    def decoded(self, ids: Sequence[int]) -> Decoded:
        try:
            pieces = self._pieces_of(ids)
        except KeyError:
            new = set(ids) - self._pieces.keys()
            self._learn(new, ids[0])
            if "".join(self._pieces_of(ids)) != self._text(ids):
                self._learn_each(new, ids[0])
            pieces = self._pieces_of(ids)
        return Decoded("".join(pieces), pieces, ids)

    def _pieces_of(self, ids: Sequence[int]) -> list[str]:
        pieces = list(map(self._pieces.__getitem__, ids))
        if not self._partial.isdisjoint(ids):
            self._join(ids, pieces)
        return pieces

    def _learn(self, new: Collection[int], first: int) -> None:
        """Ask for the text of tokens in one question, each after the prompt's first, which is a mark mostly."""
        separator = self._text([first])
        others = [token for token in new if token != first]
        pieces = (
            self._text([token for other in others for token in (first, other)]).split(separator)
            if separator
            else []
        )
        if len(pieces) != len(others) + 1 or pieces[0]:
            self._learn_each(new, first)
            return
        self._keep(first, separator)
        for token_id, piece in zip(others, pieces[1:], strict=True):
            self._keep(token_id, piece)

    def _learn_each(self, new: Collection[int], first: int) -> None:
        """Ask for each token's text after another one, as some tokenizers drop the blank with which a text begins."""
        before = self._text([first])
        for token in new:
            both = self._text([first, token])
            self._keep(token, both[len(before) :] if both.startswith(before) else self._text([token]))

    def _keep(self, token: int, piece: str) -> None:
        self._pieces[token] = piece
        if PARTIAL in piece or not piece:
            self._partial.add(token)

    def _join(self, ids: Sequence[int], pieces: list[str]) -> None:
        """Decode tokens in a row together that have only parts of characters: the first one gets their text."""
        place = 0
        while place < len(ids):
            end = place
            while end < len(ids) and ids[end] in self._partial:
                end += 1
            if end - place > 1:
                pieces[place:end] = [self._text(list(ids[place:end])), *[""] * (end - place - 1)]
            place = end + 1
