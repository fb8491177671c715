"""What must be gone when a round is over: blocks in use, and anything that belongs to a request.

`problems` looks at the tables by name. `kept` needs no names: it walks from the scheduler through every object that it
reaches, the core's own tables with it, and lists the paths to requests and to their ids.
"""

from __future__ import annotations

import gc
from collections import deque
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from bench import audit
from kvtune.lab.sim.engine_types import EngineCore
from kvtune.plugin.core.outputs.message import OUTLET

if TYPE_CHECKING:
    from kvtune.plugin.core.outputs.outlet import Outlet, _Client

TABLES = (
    "requests",
    "running",
    "waiting",
    "kv_holding_waiting",
    "deferred_waiting",
    "finished_req_ids",
    "reset_preempted_req_ids",
    "deferred_frees",
    "_inflight_prefills",
    "_in_flight",
    "steady_placed",
)
"""Of a scheduler, vLLM's and the core's."""
GROUP_TABLES = ("req_to_blocks", "num_cached_block", "continued")
"""Of a KV cache group."""
PREFIXES = ("vllm.config", "transformers", "torch", "numpy", "logging", "concurrent", "threading")
"""Objects of these packages refer to no request."""
MOST_PATHS = 5
MOST_SLOTS = 2000
"""Twice the requests that live at once, and some."""


def problems(engine: EngineCore, ids: range) -> list[str]:
    """What the engine has left of the requests with these ids, one line each."""
    scheduler = engine.scheduler
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    found = audit.check(scheduler)
    held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    if held:
        found.append(f"{held} blocks are held")
    found += [
        f"scheduler.{name} has {len(table)}" for name in TABLES if (table := getattr(scheduler, name, None))
    ]
    for number, group in enumerate(manager.coordinator.single_type_managers):
        found += [
            f"group {number}: {name} has {len(table)}"
            for name in GROUP_TABLES
            if (table := getattr(group, name, None))
        ]
    slots = [len(client._slot_of) + len(client._named) for client in _clients(engine)]
    found += [f"a client has {count} slots" for count in slots if count > MOST_SLOTS]
    if engine.batch_queue:
        found.append(f"{len(engine.batch_queue)} batches are in flight")
    return found or [f"{path} is kept" for path in kept(engine, ids)]


def kept(engine: EngineCore, ids: range) -> list[str]:
    """Paths from the engine to requests, and to ids of these requests; at most MOST_PATHS."""
    from vllm.v1.request import Request

    names = {str(number) for number in ids}
    paths: list[str] = []
    roots = {"scheduler": engine.scheduler, "queue": engine.batch_queue}
    seen = {id(root) for root in roots.values()}
    seen |= {id(part) for client in _clients(engine) for part in (client._slot_of, client._named)}
    trail: dict[int, tuple[int, str]] = {}
    todo: deque[Any] = deque()
    for name, root in roots.items():
        trail[id(root)] = (0, name)
        todo.append(root)
    while todo and len(paths) < MOST_PATHS:
        each = todo.popleft()
        for inner in gc.get_referents(each):
            if id(inner) in seen:
                continue
            if type(inner) is str:
                if inner in names:
                    seen.add(id(inner))
                    paths.append(_path(each, trail) + f" -> {inner}")
                continue
            if isinstance(inner, Request):
                seen.add(id(inner))
                paths.append(_path(each, trail) + f" -> request {inner.request_id}")
                continue
            if not gc.is_tracked(inner) or isinstance(inner, type | ModuleType | CodeType) or _foreign(inner):
                continue
            seen.add(id(inner))
            trail[id(inner)] = (id(each), _name(each, inner))
            if isinstance(inner, FunctionType):  # what it closes over, not its module
                for cell in inner.__closure__ or ():
                    seen.add(id(cell))
                    trail[id(cell)] = (id(inner), "closure")
                    todo.append(cell)
                continue
            todo.append(inner)
    return paths


def _clients(engine: EngineCore) -> list[_Client]:
    """Readers of columns. The names of their slots stay when requests are gone, until the slots are needed again."""
    outlet: Outlet | None = getattr(engine, OUTLET, None)
    return [] if outlet is None else list(outlet._clients.values())


def _foreign(thing: object) -> bool:
    return type(thing).__module__.startswith(PREFIXES)


def _name(owner: object, inner: object) -> str:
    """The attribute or the type by which `owner` refers to `inner`."""
    for name, value in getattr(owner, "__dict__", {}).items():
        if value is inner:
            return str(name)
    return type(inner).__name__


def _path(last: object, trail: dict[int, tuple[int, str]]) -> str:
    names, at = [], id(last)
    while at in trail:
        at, name = trail[at]
        names.append(name)
    return ".".join(reversed(names))
