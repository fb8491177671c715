"""Block hashes of a workload's requests, as bytes objects that requests of one conversation share.

A prompt that goes on where an earlier one ended has that one's hashes first. Python keeps a bytes object's own hash and
compares an object with itself at once, so looking a prompt up in the pool is quick. Simulator's process only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvtune.requests.types import Request

MOST_BLOCKS = 1 << 20
"""The chains that are kept to be shared have at most as many blocks, about 100 bytes each."""


class Chain:
    """The hashes of all full blocks of a prompt and its answer, and the pool's keys of them, by KV cache group."""

    __slots__ = ("_keys", "array", "hashes")

    def __init__(self, array: NDArray[np.uint64], before: Chain | None = None) -> None:
        """`before`: a chain with which this one may begin."""
        self.array = array
        common = 0 if before is None else _common(array, before.array)
        self.hashes: list[bytes] = array[common:].astype("<u8").view("V8").tolist()
        self._keys: dict[int, list[bytes]] = {}
        if before is not None and common:
            for group, keys in before._keys.items():
                self._keys[group] = keys[:common] + with_group(self.hashes, group)
            self.hashes = before.hashes[:common] + self.hashes

    def keys(self, group: int) -> list[bytes]:
        """Return the pool's keys of all blocks in a KV cache group."""
        keys = self._keys.get(group)
        if keys is None:
            keys = self._keys[group] = with_group(self.hashes, group)
        return keys


class BlockHashes(list[bytes]):
    """A request's hashes so far, which vLLM reads and appends to."""

    __slots__ = ("chain",)

    chain: Chain


class Chains:
    """Makes the chains of one workload's requests in any order."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._continued = frozenset(index for request in requests for index in request.after)
        self._kept: OrderedDict[int, Chain] = OrderedDict()
        """Keyed by a request that others wait for or, where conversations do not say so, by the first block's hash."""
        self._blocks = 0

    def make(self, index: int, array: NDArray[np.uint64]) -> Chain:
        first = int(array[0]) if len(array) else 0
        continued = (self._kept.get(key) for key in (*self._requests[index].after, -1 - first))
        before = next((chain for chain in continued if chain is not None), None)
        chain = Chain(array, before)
        self._keep(index if index in self._continued else -1 - first, chain)
        return chain

    def _keep(self, key: int, chain: Chain) -> None:
        replaced = self._kept.pop(key, None)
        self._kept[key] = chain
        self._blocks += len(chain.array) - (0 if replaced is None else len(replaced.array))
        while self._blocks > MOST_BLOCKS:
            _, oldest = self._kept.popitem(last=False)
            self._blocks -= len(oldest.array)


def _common(first: NDArray[np.uint64], other: NDArray[np.uint64]) -> int:
    """Return the number of blocks with which both begin. Hashes are chained: after one that differs, all do."""
    most = min(len(first), len(other))
    same = first[:most] == other[:most]
    return most if same.all() else int(same.argmin())


def with_group(hashes: Sequence[bytes], group: int) -> list[bytes]:
    suffix = group.to_bytes(4, "big")
    return [block_hash + suffix for block_hash in hashes]
