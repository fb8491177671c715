"""Hooks into EngineCore's wait for a step's tokens: `result()` of the executor's futures.

Used by the core and the probe. Each future that the executor returns is replaced by one that calls a function in place
of `result()`. Several may wrap one future. Nothing is kept here when a future is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

CALLS = ("execute_model", "sample_tokens")


class Future(Protocol):
    """concurrent.futures.Future, or a class of vLLM with these methods."""

    def done(self) -> bool: ...
    def result(self, timeout: float | None = None) -> object: ...


Wait = Callable[[Future], object]
"""Waits for a future, and returns its result."""


class WatchedFuture:
    """A future whose `result()` calls `wait`, unless it is called with a timeout."""

    __slots__ = ("_future", "_wait")

    def __init__(self, future: Future, wait: Wait) -> None:
        self._future, self._wait = future, wait

    def result(self, timeout: float | None = None) -> object:
        return self._future.result(timeout) if timeout is not None else self._wait(self._future)

    def done(self) -> bool:
        return self._future.done()

    @property
    def inner(self) -> Future:
        """The executor's own future, inside all wrappers."""
        return self._future.inner if isinstance(self._future, WatchedFuture) else self._future

    def __getattr__(self, name: str) -> object:
        return getattr(self._future, name)


def watch_waits(executor: object, wait: Wait) -> None:
    """Make every future that this executor returns from now on call `wait`. The executor's calls are not delayed."""
    for name in CALLS:
        setattr(executor, name, _watched(getattr(executor, name), wait))


def _watched(call: Callable[..., object], wait: Wait) -> Callable[..., object]:
    def called(*args: object, **options: object) -> object:
        returned = call(*args, **options)
        return WatchedFuture(cast("Future", returned), wait) if hasattr(returned, "result") else returned

    return called
