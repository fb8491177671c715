"""vLLM's real schedulers with and without the queue of `admission=longest_prefix`, stepped as EngineCore does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvtune.core.settings import CoreSettings, parse
from tests.core.pool_rig import Engine, tokens
from tests.core.steady_rig import Shape, admission, scheduler, state


class Clock:
    """The time that ages are taken by; each step of an engine lasts one second."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@contextmanager
def clocked() -> Iterator[Clock]:
    clock = Clock()
    state.clock = clock
    try:
        yield clock
    finally:
        state.clear()


class Overloaded(Engine):
    """An engine whose requests queue; writes down who was admitted, in order, and when."""

    def __init__(self, shape: Shape, clock: Clock, age_s: float | None = 1e4, **core: Any) -> None:
        """`age_s` None: stock's queue."""
        asked: dict[str, Any] = dict(core)
        if age_s is not None:
            asked |= {"admission": "longest_prefix", "admission_age_s": age_s}
        settings: CoreSettings = parse(asked)
        super().__init__(shape, settings)
        scheduler.adopt(self.scheduler, settings)
        if age_s is not None:
            admission.adopt(self.scheduler, settings)
        self.clock = clock
        self.admitted: list[str] = []
        self.at_s: dict[str, float] = {}

    @property
    def queue(self) -> Any:
        return self.scheduler.waiting

    def step(self) -> Any:
        scheduled = super().step()
        for new in scheduled.scheduled_new_reqs:
            self.admitted.append(new.req_id)
            self.at_s[new.req_id] = self.clock.now_s
        self.clock.now_s += 1
        return scheduled

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(5000):
            if done():
                return
            self.step()
        raise AssertionError("that never happened")


ONE = Shape(seqs=1, blocks=200, batched=64)
"""One request runs, all others wait."""
SEVERAL = Shape(seqs=4, blocks=90, batched=48)
HYBRID = Shape(seqs=4, windows=(12,), blocks=160, batched=48)


def warm(engine: Overloaded, *prompts: list[int]) -> None:
    """Have the prompts' blocks cached, then something running, so that whoever comes now waits."""
    for prompt in prompts:
        engine.serve(prompt, 1)
    engine.add(tokens(999, 20), 6)
    engine.step()
    engine.admitted.clear()
