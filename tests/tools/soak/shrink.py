"""Fewer requests that still fail: pieces of a list are left out as long as the failure stays. Pure.

Delta debugging by complements: halves first, then quarters, down to single items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(items: Sequence[T], fails: Callable[[Sequence[T]], bool], budget: int) -> list[T]:
    """The shortest list reached within `budget` calls of `fails`, in the order of `items`, which must fail.

    With enough budget no single item can be left out of the result. A replay that fails only sometimes shrinks less:
    the result is always a list that failed when it was asked.
    """
    kept = list(items)
    size = (len(kept) + 1) // 2
    while size and budget > 0:
        before, start = len(kept), 0
        while start < len(kept) and budget > 0:
            fewer = kept[:start] + kept[start + size :]
            budget -= 1
            if fails(fewer):
                kept = fewer  # what followed the piece now begins at `start`
            else:
                start += size
        if size > 1:
            size //= 2
        elif len(kept) == before:
            break  # a whole pass of single items removed none
    return kept
