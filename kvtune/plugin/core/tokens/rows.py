"""Sampled tokens as one array; the lists that vLLM expects are made when they are first read.

| container | made by | rows |
|---|---|---|
| TokenRows | PackedRows, when lists were needed | a plain list of lists, with the array as an attribute |
| PackedRows | unpickling a ModelRunnerOutput | become lists, all at once, when first used |
| PassingRows | runners, when every row is one token | made at each access, for readers in the same process |

All are subclasses of list, because consumers (drafters, rejection sampling) expect lists. Rows of several lengths
(speculative decoding) are packed as tokens and counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, SupportsIndex, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.plugin.vllm.plugin_state import STATE

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput


Tokens = NDArray[np.int32]
Packed = tuple[bytes, bytes | None]
"""Rows as int32 bytes: tokens, and tokens per row (None if every row has one)."""


class TokenRows(list):  # type: ignore[type-arg]
    """Rows of tokens and the array that they came from; `counts` is None when every row is one token."""

    __slots__ = ("counts", "flat", "tokens")

    tokens: Tokens
    counts: NDArray[np.int32] | None
    flat: list[int]

    @classmethod
    def of(cls, tokens: Tokens, counts: NDArray[np.int32] | None = None) -> TokenRows:
        rows = cls()
        rows.tokens = tokens
        rows.counts = counts
        return rows

    def make(self) -> None:
        """Turn the array into lists, in place. Here they exist already."""

    def __reduce_ex__(
        self, protocol: SupportsIndex
    ) -> tuple[type[list[list[int]]], tuple[()], None, Iterator[list[int]]]:
        return list, (), None, iter(self)


class PackedRows(TokenRows):
    """Rows that become lists when a list method is first called."""

    __slots__ = ()

    def make(self) -> None:
        tokens, counts = self.tokens, self.counts
        self.__class__ = TokenRows  # type: ignore[assignment]
        if counts is None:
            self[:] = tokens.reshape(-1, 1).tolist()
        else:
            flat, ends = tokens.tolist(), np.cumsum(counts).tolist()
            self[:] = [flat[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]


def _made_first(name: str) -> Callable[..., object]:
    plain: Callable[..., object] = getattr(list, name)

    @functools.wraps(plain)
    def method(self: PackedRows, *args: object, **options: object) -> object:
        self.make()
        return plain(self, *args, **options)

    return method


LIST_METHODS = (
    *("__len__", "__getitem__", "__iter__", "__reversed__", "__contains__", "__setitem__", "__delitem__"),
    *("__add__", "__iadd__", "__mul__", "__imul__", "__rmul__", "__eq__", "__ne__", "__repr__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "append", "extend", "insert", "pop", "remove", "clear"),
    *("index", "count", "sort", "reverse", "copy"),
)
for _name in LIST_METHODS:
    setattr(PackedRows, _name, _made_first(_name))


class PassingRows(PackedRows):
    """Rows of one token each; every access returns a new list, which is not kept."""

    __slots__ = ()

    @classmethod
    def of_flat(cls, flat: list[int]) -> PassingRows:
        rows = cls()
        rows.flat = flat
        rows.counts = None
        return rows

    def make(self) -> None:
        self.tokens = np.array(self.flat, dtype=np.int32)
        super().make()

    def __len__(self) -> int:
        return len(self.flat)

    @overload
    def __getitem__(self, index: SupportsIndex) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [[token] for token in self.flat[index]]
        return [self.flat[index]]

    def __iter__(self) -> Iterator[list[int]]:
        return ([token] for token in self.flat)


def one_each(rows: object) -> NDArray[np.int64] | None:
    """Return the tokens as a new array if every row holds exactly one, else None."""
    if isinstance(rows, PassingRows):
        return np.array(rows.flat, dtype=np.int64)
    if isinstance(rows, PackedRows):
        return None if rows.counts is not None else rows.tokens.astype(np.int64)
    if not isinstance(rows, list) or not rows or not all(rows):
        return None
    flat = list(chain.from_iterable(rows))
    return np.array(flat, dtype=np.int64) if len(flat) == len(rows) else None


def make_rows(output: ModelRunnerOutput) -> None:
    """Turn a model output's rows into lists, for a reader that indexes each of them."""
    rows = output.sampled_token_ids
    if isinstance(rows, TokenRows):
        rows.make()


def pack(rows: object) -> Packed | None:
    """Return rows as bytes, or None for anything else."""
    if isinstance(rows, PassingRows):
        return np.array(rows.flat, dtype=np.int32).tobytes(), None
    if isinstance(rows, PackedRows):
        return rows.tokens.tobytes(), None if rows.counts is None else rows.counts.tobytes()
    if not isinstance(rows, list) or not rows:
        return None
    if not all(type(row) is list for row in rows):
        return None
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.int32)
    if len(flat) == len(rows) and all(rows):
        return flat.tobytes(), None
    return flat.tobytes(), np.fromiter(map(len, rows), dtype=np.int32, count=len(rows)).tobytes()


def unpack(packed: Packed) -> PackedRows:
    tokens, counts = packed
    rows = PackedRows.of(
        np.frombuffer(tokens, dtype=np.int32),
        None if counts is None else np.frombuffer(counts, dtype=np.int32),
    )
    assert isinstance(rows, PackedRows)
    return rows


class OneToken(msgspec.Struct, array_like=True, gc=False, eq=False):
    """A row of one token that the garbage collector does not track; msgspec encodes it as a list of one token.

    Used only in EngineCoreProc, which encodes its outputs for another process, so that nobody changes a row.
    """

    token: int

    def __len__(self) -> int:
        return 1

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return [self.token][index]

    def __iter__(self) -> Iterator[int]:
        return iter((self.token,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | OneToken) and list(other) == [self.token]

    def __hash__(self) -> int:
        return hash(self.token)

    def __repr__(self) -> str:
        return f"[{self.token}]"


def out_rows(sampled: list[int]) -> Iterator[OneToken | list[int]]:
    """Yield a one-token row for each token, for EngineCoreOutput.new_token_ids."""
    if STATE.outputs_are_encoded:
        return map(OneToken, sampled)
    return ([token] for token in sampled)
