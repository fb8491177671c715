"""Defects for the million, and the runs that its tests look at: `python -m tests.tools.soak.million_plants OUT.json`.

A plant changes each engine that is built, in a process that ends with its portion.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.tools.soak import million
from tests.tools.soak.million_engine import MODELS, PLANTED, SCHEDULINGS, Built

EVERY = 10
"""Calls from one planted defect to the next."""
KEPT: list[bytes] = []
SOME = {
    "tiny-llama": SCHEDULINGS,
    "tiny-gemma3": (SCHEDULINGS[0], SCHEDULINGS[3]),
    "tiny-qwen3next": (SCHEDULINGS[1], SCHEDULINGS[2]),
}
"""What the tests play of each model."""


def _wrapped(thing: Any, name: str, act: Callable[..., Any]) -> None:
    """At every EVERYth call `thing.name` is `act(what it was, *args)`."""
    whole, calls = getattr(thing, name), itertools.count(1)

    def planted(*args: Any, **options: Any) -> Any:
        return whole(*args, **options) if next(calls) % EVERY else act(whole, *args, **options)

    setattr(thing, name, planted)


def block_freed_twice(built: Built) -> None:
    def twice(free: Any, blocks: Any) -> None:
        freed = list(blocks)
        free(freed)
        free(freed[:1])

    _wrapped(built.engine.scheduler.kv_cache_manager.block_pool, "free_blocks", twice)


def request_kept_after_its_abort(built: Built) -> None:
    kept: list[Any] = []
    built.engine.scheduler.planted = kept  # type: ignore[attr-defined]

    def finish(whole: Any, *args: Any) -> None:
        kept.append({"requests": whole(*args)})

    _wrapped(built.engine.scheduler, "finish_requests", finish)


def table_entry_kept_after_an_abort(built: Built) -> None:
    group = built.engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0]

    def finish(whole: Any, names: Any, status: Any) -> None:
        names = list(names)
        whole(names, status)
        group.num_cached_block[names[0]] = 1

    _wrapped(built.engine.scheduler, "finish_requests", finish)


def request_finished_short(built: Built) -> None:
    def add(whole: Any, request: Any) -> None:
        request.max_tokens = max(1, request.max_tokens - 1)
        whole(request)

    _wrapped(built.engine.scheduler, "add_request", add)


def abort_not_heard(built: Built) -> None:
    _wrapped(built.engine.scheduler, "finish_requests", lambda whole, *args: None)


def request_never_scheduled(built: Built) -> None:
    def add(whole: Any, request: Any) -> None:
        whole(request)
        built.engine.scheduler.waiting.remove_request(request)  # type: ignore[attr-defined]

    _wrapped(built.engine.scheduler, "add_request", add)


def other_block_than_stock(built: Built) -> None:
    """The core, set to decide as stock does, gives out the free blocks in another order: no invariant breaks."""
    if built.kind != "alike":
        return
    queue: Any = built.engine.scheduler.kv_cache_manager.block_pool.free_block_queue

    def schedule(whole: Any, *args: Any) -> Any:
        if queue.num_free_blocks:
            queue.append_n(queue.popleft_n(1))
        return whole(*args)

    _wrapped(built.engine.scheduler, "schedule", schedule)


def steady_path_gives_up(built: Built) -> None:
    """An error in the core's own bookkeeping, which no request notices."""
    if built.settings.core == "kvtune":
        _wrapped(built.engine.scheduler, "steady_limits", lambda whole, request: None)


def bytes_kept_by_a_request(built: Built) -> None:
    """Where no table of the engine shows them: only the census does."""
    million.CENSUS = 1

    def add(whole: Any, request: Any) -> None:
        KEPT.extend(bytes([number % 256] * 400) for number in range(40 * EVERY))
        whole(request)

    _wrapped(built.engine.scheduler, "add_request", add)


PLANTS: tuple[Callable[[Built], None], ...] = (
    block_freed_twice,
    request_kept_after_its_abort,
    table_entry_kept_after_an_abort,
    request_finished_short,
    abort_not_heard,
    request_never_scheduled,
    other_block_than_stock,
    steady_path_gives_up,
    bytes_kept_by_a_request,
)


def planted(plant: Callable[[Built], None]) -> million.Portion:
    PLANTED.append(plant)
    lockstep = 1 if plant is other_block_than_stock else 0
    return million.run(MODELS["tiny-llama"], 0, 1500, None, SCHEDULINGS[:1], replays=8, lockstep=lockstep)


def main(out: Path) -> None:
    with million.imported():
        models = [
            million.in_fork(partial(million.run, MODELS[name], 0, 600, None, some))
            for name, some in SOME.items()
        ]
        seeds = [
            million.in_fork(
                partial(million.run, MODELS["tiny-llama"], seed, 200, None, SCHEDULINGS[1:2], lockstep=0)
            )
            for seed in (3, 3, 4)
        ]
        plants = {plant.__name__: million.in_fork(partial(planted, plant)) for plant in PLANTS}
    written = {
        "models": list(map(dataclasses.asdict, models)),
        "seeds": list(map(dataclasses.asdict, seeds)),
        "plants": {name: dataclasses.asdict(portion) for name, portion in plants.items()},
    }
    out.write_text(json.dumps(written))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    os._exit(0)  # as in million.py
