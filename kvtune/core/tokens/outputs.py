"""The one-token rows in EngineCore's outputs, made without objects that the garbage collector tracks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

import msgspec

from kvtune.vllm.plugin_state import STATE


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
