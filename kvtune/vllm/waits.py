"""Where EngineCore waits for a step's tokens: `result()` of what the executor returned. For the core and the probe.

Futures that the executor returns are replaced by ones that call a function in place of `result()`. Several
may wrap one future. When a future is dropped, nothing of it is left here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from kvtune.vllm.types import Executor

CALLS = ("execute_model", "sample_tokens")


class Future(Protocol):
    """concurrent.futures.Future, or what stands for it in vLLM."""

    def done(self) -> bool: ...
    def result(self, timeout: float | None = None) -> object: ...


Wait = Callable[[Future], object]
"""Returns the future's result."""


class WatchedFuture:
    """The future with another `result()`."""

    __slots__ = ("_future", "_wait")

    def __init__(self, future: Future, wait: Wait) -> None:
        self._future, self._wait = future, wait

    def result(self, timeout: float | None = None) -> object:
        return self._future.result(timeout) if timeout is not None else self._wait(self._future)

    def done(self) -> bool:
        return self._future.done()

    @property
    def inner(self) -> Future:
        """The executor's own future, below all others."""
        return self._future.inner if isinstance(self._future, WatchedFuture) else self._future

    def __getattr__(self, name: str) -> object:
        return getattr(self._future, name)


def watch_waits(executor: Executor, wait: Wait) -> None:
    """Let every future that this executor returns from now on call `wait`. The executor's calls are not delayed."""
    for name in CALLS:
        setattr(executor, name, _watched(getattr(executor, name), wait))


def _watched(call: Callable[..., object], wait: Wait) -> Callable[..., object]:
    def called(*args: object, **options: object) -> object:
        returned = call(*args, **options)
        return WatchedFuture(cast("Future", returned), wait) if hasattr(returned, "result") else returned

    return called
