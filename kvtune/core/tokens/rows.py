"""Sampled tokens as one array from the worker to the scheduler. Workers pack, EngineCore unpacks; rows on demand.

| container | made by | rows |
|---|---|---|
| TokenRows | a reader that wanted lists | a plain list of lists that also remembers its array |
| PackedRows | unpickling a ModelRunnerOutput | become lists, all in one call, when first touched |
| PassingRows | runners, when every row is one token | made anew at each access: for readers in the same process |

All are lists, so consumers (drafters, rejection sampling, `isinstance(x, list)`) see what they always saw. Ragged
rows (speculative decoding) travel as tokens and counts. With the switch off nothing here is in the way.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.core import state
from kvtune.core.patches import Replaced
from kvtune.core.settings import CoreSettings

Tokens = NDArray[np.int32]


class TokenRows(list):  # type: ignore[type-arg]
    """Rows of tokens that remember the array they came from; `counts` is None when every row is one token."""

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
        """Turn into plain rows, in place; does nothing when they are."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return list, (), None, iter(self)


class PackedRows(TokenRows):
    """Rows that are not made yet."""

    __slots__ = ()

    def make(self) -> None:
        tokens, counts = self.tokens, self.counts
        self.__class__ = TokenRows  # type: ignore[assignment]
        if counts is None:
            self[:] = tokens.reshape(-1, 1).tolist()
        else:
            flat, ends = tokens.tolist(), np.cumsum(counts).tolist()
            self[:] = [flat[end - count : end] for end, count in zip(ends, counts.tolist(), strict=True)]


def _made_first(name: str) -> Any:
    plain = getattr(list, name)

    @functools.wraps(plain)
    def method(self: PackedRows, *args: Any, **options: Any) -> Any:
        self.make()
        return plain(self, *args, **options)

    return method


TOUCHING = (
    *("__len__", "__getitem__", "__iter__", "__reversed__", "__contains__", "__setitem__", "__delitem__"),
    *("__add__", "__iadd__", "__mul__", "__imul__", "__rmul__", "__eq__", "__ne__", "__repr__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "append", "extend", "insert", "pop", "remove", "clear"),
    *("index", "count", "sort", "reverse", "copy"),
)
for _name in TOUCHING:
    setattr(PackedRows, _name, _made_first(_name))


class PassingRows(PackedRows):
    """Rows of one token each that are handed out as lists of their own at each access and never kept."""

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

    def __getitem__(self, index: Any) -> Any:
        found = self.flat[index]
        return [[token] for token in found] if isinstance(index, slice) else [found]

    def __iter__(self) -> Iterator[list[int]]:
        return ([token] for token in self.flat)


def one_each(rows: Any) -> NDArray[np.int64] | None:
    """The tokens of rows that hold exactly one each, as an array of their own; else None."""
    kind = type(rows)
    if kind is PassingRows:
        return np.array(rows.flat, dtype=np.int64)
    if kind is PackedRows:
        return None if rows.counts is not None else rows.tokens.astype(np.int64)
    if not isinstance(rows, list) or not rows or not all(rows):
        return None
    flat = list(chain.from_iterable(rows))
    return np.array(flat, dtype=np.int64) if len(flat) == len(rows) else None


def make_rows(output: Any) -> None:
    """Plain rows for a reader that indexes every one of them."""
    rows = output.sampled_token_ids
    if isinstance(rows, TokenRows):
        rows.make()


def pack(rows: Any) -> tuple[bytes, bytes | None] | None:
    """Rows as bytes of int32: tokens, and counts where rows differ from one token each; None for anything else."""
    if type(rows) is PassingRows:
        return np.array(rows.flat, dtype=np.int32).tobytes(), None
    if type(rows) is PackedRows:
        return rows.tokens.tobytes(), None if rows.counts is None else rows.counts.tobytes()
    if not isinstance(rows, list) or not rows:
        return None
    if not all(type(row) is list for row in rows):
        return None
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.int32)
    if len(flat) == len(rows) and all(rows):
        return flat.tobytes(), None
    return flat.tobytes(), np.fromiter(map(len, rows), dtype=np.int32, count=len(rows)).tobytes()


def unpack(packed: tuple[bytes, bytes | None]) -> PackedRows:
    tokens, counts = packed
    rows = PackedRows.of(
        np.frombuffer(tokens, dtype=np.int32),
        None if counts is None else np.frombuffer(counts, dtype=np.int32),
    )
    assert isinstance(rows, PackedRows)
    return rows


def _reduce_output(output: Any) -> tuple[Any, ...]:
    fields = dict(output.__dict__)
    packed = pack(fields["sampled_token_ids"])
    if packed is not None:
        del fields["sampled_token_ids"]
    return restore_output, (fields, packed)


def restore_output(fields: dict[str, Any], packed: tuple[bytes, bytes | None] | None) -> Any:
    """A ModelRunnerOutput as its worker sent it."""
    from vllm.v1.outputs import ModelRunnerOutput

    output = ModelRunnerOutput.__new__(ModelRunnerOutput)
    output.__dict__.update(fields)
    if packed is not None:
        output.sampled_token_ids = unpack(packed)
    return output


class OneToken(msgspec.Struct, array_like=True, gc=False, eq=False):
    """A row of one token that the collector does not see; encodes as the list of one that it stands for.

    Only in a process whose outputs are encoded for another one (EngineCoreProc): nobody there changes a row.
    """

    token: int

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: Any) -> Any:
        return [self.token][index]

    def __iter__(self) -> Iterator[int]:
        return iter((self.token,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list | OneToken) and list(other) == [self.token]

    def __hash__(self) -> int:
        return hash(self.token)

    def __repr__(self) -> str:
        return f"[{self.token}]"


outputs_are_encoded = False
"""Whether this process sends its outputs to another one (set when an EngineCoreProc's loop begins)."""


def out_rows(sampled: list[int]) -> Iterator[Any]:
    """One row a token, for EngineCoreOutput.new_token_ids."""
    if outputs_are_encoded:
        return map(OneToken, sampled)
    return ([token] for token in sampled)


REPLACED = Replaced()


def install(settings: CoreSettings) -> None:
    """Pack what workers send; make no rows where nobody reads them."""
    uninstall()
    if not settings.rows:
        return
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.outputs import ModelRunnerOutput

    from kvtune.core.tokens import runners

    copyreg.pickle(ModelRunnerOutput, _reduce_output)
    loop = EngineCoreProc._process_input_queue

    @functools.wraps(loop)
    def looped(self: Any) -> Any:
        # Plugins are loaded inside EngineCoreProc's constructor: its loop is the first that can be wrapped.
        global outputs_are_encoded
        outputs_are_encoded = True
        return loop(self)

    REPLACED.put(EngineCoreProc, "_process_input_queue", looped)
    runners.install()
    state.part("rows", True)


def uninstall() -> None:
    """Model outputs are pickled, rows made and put out as stock does."""
    from vllm.v1.outputs import ModelRunnerOutput

    from kvtune.core.tokens import runners

    global outputs_are_encoded
    outputs_are_encoded = False
    copyreg.dispatch_table.pop(ModelRunnerOutput, None)
    runners.REPLACED.undo()
    REPLACED.undo()
