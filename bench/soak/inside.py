"""Loaded by a soak's servers, stock or core: a census of each process, a clock that jumps, and planted defects.

    PYTHONPATH=bench/soak/plugin vllm serve MODEL --middleware bench.soak.inside.Front \\
        --worker-extension-cls bench.soak.inside.Extension

GET /soak/census and POST /soak/clock?s=SECONDS answer for the API server, EngineCore and worker, in this order.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

REQUESTS = ("Request", "CachedRequestState", "RequestState", "RequestOutputCollector", "Row")
"""Classes of which each request has one object, in one of the processes."""

_time = time.time


def set_clock(ahead_s: float) -> None:
    """Move this process's wall clock, for all Python that asks `time.time`."""
    time.time = lambda: _time() + ahead_s


def own_memory(status: str) -> int:
    """Bytes in memory without a file behind them, from /proc/PID/status: the probe fills 24 MB of a file once."""
    kib = dict(re.findall(r"^(Rss(?:Anon|Shmem)):\s+(\d+) kB", status, re.M))
    return 1024 * (int(kib["RssAnon"]) + int(kib["RssShmem"]))


def process_census() -> dict[str, int]:
    """What this process has: counts, and bytes."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # else freed pages stay, and look like growth
    own = Path("/proc/self")
    kinds = Counter(type(each).__name__ for each in gc.get_objects())
    return {
        "pid": os.getpid(),
        "objects": kinds.total(),
        "allocations": sys.getallocatedblocks(),
        "resident": own_memory((own / "status").read_text()),
        "handles": len(list((own / "fd").iterdir())),
        "threads": threading.active_count(),
        **{f"kind:{name}": kinds[name] for name in REQUESTS},
    }


class Extension:
    """Methods that vLLM adds to its worker."""

    def soak_census(self) -> dict[str, int]:
        plant("worker", self)
        held = len(self.model_runner.requests)  # type: ignore[attr-defined]
        return process_census() | {"worker_requests": held}

    def soak_clock(self, ahead_s: float) -> None:
        set_clock(ahead_s)


def engine_census(self: Any) -> list[dict[str, int]]:
    """A method that `register` adds to EngineCore: of itself, and of its worker."""
    plant("EngineCore", self)
    scheduler = self.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    own = process_census() | {
        "requests": len(scheduler.requests),
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "held_blocks": sum(block.ref_cnt > 0 and not block.is_null for block in pool.blocks),
        "missing_blocks": len(pool.blocks) - 1 - pool.get_num_free_blocks(),
        "block_tables": sum(len(each.req_to_blocks) for each in managers),
    }
    return [own, *self.collective_rpc("soak_census")]


def engine_clock(self: Any, ahead_s: float) -> None:
    set_clock(ahead_s)
    self.collective_rpc("soak_clock", args=(ahead_s,))


def register() -> None:
    """vLLM's general plugin `soak` (plugin/), in each of its processes."""
    from vllm.v1.engine.core import EngineCore

    from bench import audit

    EngineCore.soak_census, EngineCore.soak_clock = engine_census, engine_clock
    audit.install()


def plant(process: str, subject: Any = None) -> None:
    """Install the defect that KVTUNE_SOAK_PLANT names, if it goes here; at the first census, so behind the core."""
    name = os.environ.pop("KVTUNE_SOAK_PLANT", "")
    if not name:
        return
    from bench.soak.plants import PLANTS

    where, install = PLANTS[name]
    if where == process:
        install(subject)


class Front:
    """ASGI middleware of the API server."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/soak/"):
            await self._app(scope, receive, send)
            return
        engine = scope["app"].state.engine_client
        if scope["path"] == "/soak/clock":
            ahead_s = float(parse_qs(scope["query_string"].decode())["s"][0])
            set_clock(ahead_s)
            found = await engine.engine_core.call_utility_async("soak_clock", ahead_s)
        else:
            plant("API server")
            others = await engine.engine_core.call_utility_async("soak_census")
            found = [front_census(engine), *others]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(found).encode()})


def front_census(engine: Any) -> dict[str, int]:
    output = engine.output_processor
    found = process_census() | {
        "states": len(output.request_states),
        "parents": len(output.parent_requests),
        "outside_names": len(output.external_req_ids),
        "tasks": len(asyncio.all_tasks()),
    }
    reader = getattr(output, "kvtune_column_reader", None)
    slots = [] if reader is None else list(reader._engines.values())
    return found | {"rows_in_slots": sum(row is not None for each in slots for row in each.rows)}
