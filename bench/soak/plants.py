"""Defects to plant in the core's server, each of which a soak must find. Loaded in vLLM's processes.

`PLANTS`: name -> the process that it goes into, and what installs it there; the argument is EngineCore, or the worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

FREES = 150
ROWS, FIRST_ROW = 100_000, 10_000


def freed_twice(engine_core: Any) -> None:
    """One block of each 150th call is freed again."""
    pool = engine_core.scheduler.kv_cache_manager.block_pool
    free, calls = pool.free_blocks, 0

    def planted(blocks: Any, *rest: Any, **named: Any) -> None:
        nonlocal calls
        blocks = list(blocks)
        free(blocks, *rest, **named)
        calls += 1
        if calls % FREES == 0 and blocks:
            free(blocks[:1], *rest, **named)

    pool.free_blocks = planted


def kept_after_abort(_: Any) -> None:
    """The API server keeps the state of a request whose client left."""
    from vllm.v1.engine.output_processor import OutputProcessor

    abort = OutputProcessor.abort_requests

    def planted(self: Any, names: Any, internal: bool) -> Any:
        before = dict(self.request_states)
        aborted = abort(self, names, internal)
        # Under another name, as vLLM's output handler would stumble over an output of a request that has ended.
        self.request_states.update({f"{name} kept": before[name] for name in aborted if name in before})
        return aborted

    OutputProcessor.abort_requests = planted


def wrong_token(worker: Any) -> None:
    """One row of 100,000 gets another token."""
    sampler = worker.model_runner.sampler
    sample, rows = sampler.forward, FIRST_ROW

    def planted(*arguments: Any, **named: Any) -> Any:
        nonlocal rows
        made = sample(*arguments, **named)
        count = len(made.sampled_token_ids)
        rows -= count
        if rows < 0:
            rows += ROWS
            made.sampled_token_ids[count // 2] ^= 1
        return made

    sampler.forward = planted


def leaked_handle(_: Any) -> None:
    """The API server opens a file for each request whose client left."""
    from vllm.v1.engine.async_llm import AsyncLLM

    abort = AsyncLLM.abort

    async def planted(self: Any, *arguments: Any, **named: Any) -> None:
        os.dup(0)
        await abort(self, *arguments, **named)

    AsyncLLM.abort = planted


PLANTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "freed twice": ("EngineCore", freed_twice),
    "kept after abort": ("API server", kept_after_abort),
    "wrong token": ("worker", wrong_token),
    "leaked handle": ("API server", leaked_handle),
}
