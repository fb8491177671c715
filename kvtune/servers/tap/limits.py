"""What a request may cost the analyst: seconds of its CPU, memory of its process, bytes of it that stay remembered."""

from __future__ import annotations

import resource
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")
REQUEST_S = 2.0
"""CPU time for a request's session, and again for the text that differs."""
REMEMBERED_BYTES = 512 << 20
PROCESS_BYTES = 4 << 30
"""Memory of the process: what is remembered, the prompts' tokens, the server's events, and one request's work."""


def limit_memory() -> None:
    """Let an allocation beyond PROCESS_BYTES fail in this process, before the machine's memory is used up."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = PROCESS_BYTES if hard == resource.RLIM_INFINITY else min(PROCESS_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class Latest(OrderedDict[Key, Value]):
    """Keeps the entries that were set last, up to a number."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class Remembered:
    """Counts the bytes of all requests that are remembered anywhere. Beyond the most, the oldest are forgotten."""

    def __init__(self, forget: Callable[[int], None], most: int = REMEMBERED_BYTES) -> None:
        self._forget = forget
        self._most = most
        self._sizes: OrderedDict[int, int] = OrderedDict()
        self.held_bytes = 0

    def add(self, number: int, size: int) -> None:
        self._sizes[number] = size
        self.held_bytes += size
        while self.held_bytes > self._most:
            self._forget_oldest()

    def clear(self) -> None:
        while self._sizes:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        number, size = self._sizes.popitem(last=False)
        self.held_bytes -= size
        self._forget(number)
