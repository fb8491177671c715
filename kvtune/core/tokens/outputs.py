"""The rows that EngineCore puts out, one token each, without an object that the collector sees where it can."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


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
