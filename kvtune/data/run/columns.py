"""A column of a run file: one .npy array, read without numpy's own reader, which allocates before it checks. Pure.

It checks, once for all analyses: one dimension, the declared type, text without invalid characters, finite numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtune.data.run.ranges import LARGEST
from kvtune.data.run.types import AT_MOST, BELOW_ZERO, MAY_BE_NAN, TABLES, Table

HEAD = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|]?[a-zA-Z]\d+)', 'fortran_order': False, 'shape': \((\d+),\), \} *\n",
    re.DOTALL,
)
"""The head that numpy writes for a column of numbers or text."""
LAST_CHARACTER = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)
MOST_TOKENS = 1 << 28
"""The largest sum of `tokens.count`: ten hours at 7,000 tokens/s. Analyses keep a number per token in memory."""


def read_column(raw: bytes, table: str, column: str) -> NDArray[Any]:
    """Return the column in its declared type. ValueError names the fault."""
    kind = TABLES[table][column]
    head = HEAD.match(raw)
    if head is None:
        raise ValueError(f"{table}.{column} is no column in numpy's format")
    stored, rows = np.dtype(head[1].decode()), int(head[2])
    if not _fits(stored, kind):
        raise ValueError(f"{table}.{column} has the type {stored.str}, not {kind}")
    if stored.itemsize * rows != len(raw) - head.end() or (rows and not stored.itemsize):
        raise ValueError(f"{table}.{column} is {rows} rows by its head, which its length contradicts")
    if not rows:
        return np.empty(0, dtype=kind)
    values = np.frombuffer(raw, dtype=stored, offset=head.end())
    if kind == "U":
        return _text(values, f"{table}.{column}")
    if kind == "f8" and not _finite(values, (table, column) in MAY_BE_NAN):
        raise ValueError(f"{table}.{column} holds a value that is not a time")
    return values.astype(kind)


def _fits(stored: np.dtype[Any], kind: str) -> bool:
    """Whether every value of the stored type can become the declared type without a change."""
    declared = np.dtype(kind)
    if "U" in (stored.kind, declared.kind):
        return stored.kind == declared.kind
    return stored.kind in "iuf" and np.can_cast(stored, declared, "safe")


def _text(values: NDArray[Any], name: str) -> NDArray[Any]:
    values = values.astype(values.dtype.newbyteorder("="))
    codes = values.view(np.uint32)
    first, last = SURROGATES
    if ((codes > LAST_CHARACTER) | ((codes >= first) & (codes <= last))).any():
        raise ValueError(f"{name} holds a value that is not a character")
    return values


def _finite(values: NDArray[Any], may_be_nan: bool) -> bool:
    """Whether all numbers are finite and not too large. NaN is allowed if `may_be_nan`."""
    fine = np.abs(values) <= LARGEST
    return bool((fine | np.isnan(values)).all() if may_be_nan else fine.all())


def check_table(name: str, table: Mapping[str, NDArray[Any]]) -> None:
    """Raise ValueError if columns differ in length, or a column of whole numbers has one outside its range."""
    lengths = {len(values) for values in table.values()}
    if len(lengths) > 1:
        raise ValueError(
            f"the columns of {name} differ in length: {', '.join(map(str, sorted(lengths)))} rows"
        )
    for column, values in table.items():
        if values.dtype.kind != "i" or not len(values):
            continue
        least, most = BELOW_ZERO.get((name, column), 0), AT_MOST.get((name, column), LARGEST)
        if values.min() < least:
            raise ValueError(f"{name}.{column} is below {least}")
        if values.max() > most:
            raise ValueError(f"{name}.{column} is above {most:g}")


def check_tables(tables: Mapping[str, Table]) -> None:
    """Raise ValueError if a row names no row of another table, or there are more than MOST_TOKENS tokens."""
    looks = len(tables["looks"]["t_s"]) if "looks" in tables else 0
    for name in ("look_misses", "look_times"):
        if name in tables and len(named := tables[name]["look"]) and named.max() >= looks:
            raise ValueError(f"{name}.look names row {named.max()} of {looks} looks")
    tokens, requests = tables.get("tokens"), tables.get("requests")
    if tokens is None or not len(tokens["request"]):
        return
    rows = len(requests["id"]) if requests is not None else 0
    if tokens["request"].max() >= rows:
        raise ValueError(f"tokens.request names row {tokens['request'].max()} of {rows} requests")
    if tokens["count"].sum(dtype=np.int64) > MOST_TOKENS:
        raise ValueError(f"tokens.count adds up to more than {MOST_TOKENS:,} tokens")
