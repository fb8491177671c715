"""The pool's invariants, checked on stock's pool and ours alike. Runs in EngineCore with KVTUNE_AUDIT=1.

    1. no reference count is negative; the null block is in no queue
    2. every block with ref_cnt 0 is in exactly one queue, once; no other block is in any
    3. a block's tier byte names the queue that it is in; counters equal the lengths of the lists
    4. in use + free + the null block = all blocks
    5. a block is referenced at least once for each place that it has in a request's block table
    6. a block that has a hash is found under it; what is found under a hash has it
    7. when no request is left, every block is free

Contract: reads only, O(blocks). KVTUNE_AUDIT=1 counts and logs violations, KVTUNE_AUDIT=raise stops the engine.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvtune.core import state
from kvtune.core.patches import PATCHES
from kvtune.errors import KvtuneError

PART = "cache.audit"

logger = logging.getLogger("vllm.kvtune")


def violations(pool: Any) -> list[str]:
    """What is wrong with a pool, one line a finding; empty when all holds."""
    found: list[str] = []
    queue = pool.free_block_queue
    lists = queue.queues[1:] if hasattr(queue, "queues") else [queue]
    seen: Counter[int] = Counter()
    for number, one in enumerate(lists, start=1):
        ids, broken = _walk(one, pool.num_gpu_blocks)
        found += [f"queue {number}: {broken}"] if broken else []
        if len(ids) != one.num_free_blocks:
            found.append(f"queue {number} counts {one.num_free_blocks} blocks and links {len(ids)}")
        seen.update(ids)
        if lists[0] is not queue:
            found += [
                f"block {i} is in queue {number}, its tier byte says {queue.tier_of[i]}"
                for i in ids
                if queue.tier_of[i] != number
            ]
    if sum(seen.values()) != queue.num_free_blocks:
        found.append(f"{queue.num_free_blocks} blocks counted as free, {sum(seen.values())} are in queues")
    in_use = 0
    for block in pool.blocks:
        times = seen[block.block_id]
        if block.is_null:
            found += ["the null block is in a queue"] if times else []
            continue
        if block.ref_cnt < 0:
            found.append(f"block {block.block_id} has ref_cnt {block.ref_cnt}")
        if times != (block.ref_cnt == 0):
            found.append(f"block {block.block_id} with ref_cnt {block.ref_cnt} is in {times} queues")
        in_use += block.ref_cnt > 0
        key = block.block_hash
        if key is not None and not pool.cached_block_hash_to_block.contain(key, block.block_id):
            found.append(f"block {block.block_id} is not found under its hash")
    if in_use + queue.num_free_blocks + 1 != pool.num_gpu_blocks:
        found.append(f"{in_use} in use + {queue.num_free_blocks} free + 1 is not {pool.num_gpu_blocks}")
    return found + _hash_map(pool)


def request_violations(scheduler: Any) -> list[str]:
    """What is wrong between a scheduler's block tables and its pool's reference counts."""
    manager = scheduler.kv_cache_manager
    places: Counter[int] = Counter()
    for group in manager.coordinator.single_type_managers:
        if group.block_pool is manager.block_pool:
            for blocks in group.req_to_blocks.values():
                places.update(block.block_id for block in blocks if not block.is_null)
    pool = manager.block_pool
    found = [
        f"block {i} has {n} places in block tables and ref_cnt {pool.blocks[i].ref_cnt}"
        for i, n in places.items()
        if pool.blocks[i].ref_cnt < n
    ]
    if not scheduler.requests and not places and not _waits_to_be_freed(scheduler):
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        found += [f"no request is left and {held} blocks are not free"] if held else []
    return found


def check(scheduler: Any) -> list[str]:
    """Everything that can be said about a scheduler between two steps."""
    return violations(scheduler.kv_cache_manager.block_pool) + request_violations(scheduler)


def install() -> None:
    """With KVTUNE_AUDIT, check every scheduler that is built from now on after each of its steps."""
    uninstall()
    if os.environ.get("KVTUNE_AUDIT") not in ("1", "raise"):
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    def wrap(init: Callable[..., None]) -> Callable[..., None]:
        def built(self: Any, *args: Any, **options: Any) -> None:
            init(self, *args, **options)
            watch(self)

        return built

    PATCHES.wrap(PART, Scheduler, "__init__", wrap)
    state.part("audit", True)


def uninstall() -> None:
    """Schedulers that are built from now on are not checked."""
    PATCHES.undo(PART)


def watch(scheduler: Any) -> None:
    """Check this scheduler after each of its steps."""

    def audited(*args: Any, **options: Any) -> Any:
        result = type(scheduler).update_from_output(scheduler, *args, **options)
        try:
            found = check(scheduler)
        except Exception as error:
            found = [f"the audit failed: {error!r}"]
        state.count("audits")
        if found:
            report(found)
        return result

    # On the instance, so that it stays in front whatever class the scheduler is given.
    scheduler.update_from_output = audited


def report(found: list[str]) -> None:
    state.count("audit_violations", len(found))
    state.note(f"audit: {found[0]}")
    logger.error("kvtune audit: %s", "; ".join(found[:10]))
    if os.environ.get("KVTUNE_AUDIT") == "raise":
        raise KvtuneError(
            f"audit: {found[0]}", "report it with the run's command; KVTUNE_AUDIT=1 only counts"
        )


def _walk(queue: Any, most: int) -> tuple[list[int], str]:
    """Block ids from head to tail, and what is wrong with the links."""
    if not hasattr(queue, "fake_free_list_head"):
        return [block.block_id for block in queue.get_all_free_blocks()], ""
    ids: list[int] = []
    previous = queue.fake_free_list_head
    block = previous.next_free_block
    while block is not None and block is not queue.fake_free_list_tail:
        if block.prev_free_block is not previous:
            return ids, f"block {block.block_id} does not link back"
        ids.append(block.block_id)
        if len(ids) > most:
            return ids, "its links go round"
        previous, block = block, block.next_free_block
    return ids, "" if block is not None else "its links end before the tail"


def _hash_map(pool: Any) -> list[str]:
    found = []
    for key, entry in pool.cached_block_hash_to_block._cache.items():
        for block in entry.values() if isinstance(entry, dict) else (entry,):
            others = pool.cached_block_hashes_by_block.get(block.block_id, ())
            if block.block_hash != key and key not in others:
                found.append(f"block {block.block_id} is found under a hash that it does not have")
    return found


def _waits_to_be_freed(scheduler: Any) -> bool:
    """Whether blocks of ended requests are held until a step in flight is done."""
    return bool(scheduler.deferred_frees)
