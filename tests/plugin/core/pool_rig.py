"""One scheduler of vLLM's with the core's pool and windows, stepped as EngineCore does; random traffic for it."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core.cache import adopt
from tests.plugin.core.steady_rig import VOCAB, Model, RequestStatus, Shape, build, request, states

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


class Engine:
    """One scheduler, stepped as EngineCore does (with a queue of two steps when asynchronous)."""

    def __init__(self, shape: Shape, settings: CoreSettings | None, seed: int = 0) -> None:
        self.shape = shape
        self.scheduler = build(shape)
        if settings is not None:
            adopt.adopt(self.scheduler.kv_cache_manager, settings)
            states.adopt(self.scheduler)
        self.model = Model(seed, shuffles=False)
        self.in_flight: deque[Any] = deque()
        self.hits: dict[str, int] = {}
        self.count = 0

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, prompt: list[int], output: int, priority: int = 0) -> str:
        self.count += 1
        name = f"r-{self.count}"
        self.scheduler.add_request(
            request(block=self.shape.block, name=name, prompt=prompt, output=output, priority=priority)
        )
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        scheduled = self.scheduler.schedule()
        for new in scheduled.scheduled_new_reqs:
            self.hits.setdefault(new.req_id, new.num_computed_tokens)
        self.in_flight.append((scheduled, self.model.run(self.scheduler, scheduled)))
        if len(self.in_flight) > self.shape.asynchronous:
            self.update(*self.in_flight.popleft())
        return scheduled

    def update(self, *step: Any) -> None:
        self.scheduler.update_from_output(*step)

    def drain(self) -> None:
        for _ in range(5000):
            if not self.scheduler.requests:
                break
            self.step()
        while self.in_flight:
            self.update(*self.in_flight.popleft())
        assert not self.scheduler.requests

    def serve(self, prompt: list[int], output: int = 4) -> int:
        """Send one request, wait for it; tokens that it found in the cache."""
        name = self.add(prompt, output)
        self.drain()
        return self.hits[name]


SHAPES = {
    "full": Shape(blocks=70),
    "hybrid": Shape(windows=(12, 12), blocks=400),
    "small_hybrid": Shape(windows=(12, 12), blocks=110),
    "dense": Shape(windows=(20,), retention=None, blocks=120),
    "interval": Shape(windows=(20,), retention=32, blocks=120),
    "priority": Shape(windows=(12,), policy="priority", blocks=90),
    "all_windows": Shape(windows=(12,), blocks=60),
}
SETTINGS = {
    "first": {"slack": 8, "min_drop": 2},
    "chat": {"policy": "chat", "slack": 8, "min_drop": 2},
    "pin": {"policy": "pin", "min_drop": 2},
    "lru": {"policy": "lru", "slack": 8, "min_drop": 2},
    "two_class": {"policy": "two_class", "reuse_bonus_s": 0.001, "min_drop": 2},
}


def random_steps(engine: Engine, seed: int, steps: int, each: Any) -> None:
    chance = random.Random(seed)
    prefixes = [[chance.randrange(VOCAB) for _ in range(60)] for _ in range(4)]
    load = 0.2
    for step in range(steps):
        if step % 60 == 0:
            load = chance.choice((0.02, 0.1, 0.4))
        while chance.random() < load:
            prompt = chance.choice(prefixes)[: chance.randrange(1, 60)]
            prompt = prompt + [chance.randrange(VOCAB) for _ in range(chance.randrange(0, 30))]
            engine.add(prompt, chance.choice((1, 2, 5, 20, 50)), chance.randrange(3))
        if chance.random() < 0.03 and engine.scheduler.requests:
            engine.abort(chance.choice(list(engine.scheduler.requests)))
        if chance.random() < 0.01:
            engine.scheduler.reset_prefix_cache()
        if chance.random() < 0.02:
            engine.pool.evict_blocks(set(chance.sample(range(engine.pool.num_gpu_blocks), 5)))
        engine.step()
        each()


def tokens(seed: int, count: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(VOCAB) for _ in range(count)]


HYBRID = Shape(windows=(12, 12), blocks=1200, batched=32, max_len=400)
