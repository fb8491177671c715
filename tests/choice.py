"""Parameters and drawn examples of which `make test` runs a few and `make full` more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

TIMES = int(os.environ.get("KVTUNE_EXAMPLES", "1"))
"""How many times as many examples are drawn as in `make test`."""
FEW = 4


def each_value(*columns: Sequence[Any]) -> list[Any]:
    """The product of the columns. All but FEW of its rows are marked `full`."""
    longest = min(FEW, max(map(len, columns)))
    few = {tuple(row % len(column) for column in columns) for row in range(longest)}
    rows = product(*(range(len(column)) for column in columns))
    return [
        pytest.param(
            *(column[at] for column, at in zip(columns, row, strict=True)),
            marks=() if row in few else pytest.mark.full,
        )
        for row in rows
    ]


def first_of(values: Sequence[Any]) -> list[Any]:
    """The values; all but the first are marked `full`. A tuple is one value of each of several parameters."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [values[0], *(pytest.param(*row, marks=pytest.mark.full) for row in rows[1:])]


def drawn(examples: int) -> int:
    """How many examples a property draws. With KVTUNE_EXAMPLES, take tests' time-outs off: `--timeout 0`."""
    return examples * TIMES
