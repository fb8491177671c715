"""Checks a block pool's invariants, stock's or the core's, after each step, in EngineCore.

    1. no reference count is negative; the null block is in no queue
    2. every block with ref_cnt 0 is in exactly one queue, once; no other block is in any
    3. a block's queue byte names the queue that it is in; counters equal the lengths of the queues
    4. in use + free + the null block = all blocks
    5. a block's ref_cnt is at least the number of its entries in requests' block tables
    6. the hash map lists every hashed block under its hash, and no block under a hash that it does not have
    7. when no request is left, every block is free

Changes nothing, O(blocks). Violations are counted and logged; KVTUNE_AUDIT=raise stops the engine. A soak's servers
load it where the variable is set (bench/soak/inside.py); other tests watch a scheduler.
"""

from __future__ import annotations

import logging
import os
from collections import Counter

from kvtune.base.errors import KvtuneError
from kvtune.plugin.core import state
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.types import BlockPool, FreeQueue, Outputs, Scheduler, has_queues

PART = "cache.audit"

logger = logging.getLogger("vllm.kvtune")


def violations(pool: BlockPool) -> list[str]:
    """Return the violations within a pool, one line each."""
    problems: list[str] = []
    queue = pool.free_block_queue
    lists = queue.queues[1:] if has_queues(queue) else [queue]
    seen: Counter[int] = Counter()
    for number, listed in enumerate(lists, start=1):
        ids, broken = _walk(listed, pool.num_gpu_blocks)
        problems += [f"queue {number}: {broken}"] if broken else []
        if len(ids) != listed.num_free_blocks:
            problems.append(f"queue {number} counts {listed.num_free_blocks} blocks and links {len(ids)}")
        seen.update(ids)
        if has_queues(queue):
            problems += [
                f"block {i} is in queue {number}, its queue byte says {queue.queue_of[i]}"
                for i in ids
                if queue.queue_of[i] != number
            ]
    if sum(seen.values()) != queue.num_free_blocks:
        problems.append(f"{queue.num_free_blocks} blocks counted as free, {sum(seen.values())} are in queues")
    in_use = 0
    for block in pool.blocks:
        times = seen[block.block_id]
        if block.is_null:
            problems += ["the null block is in a queue"] if times else []
            continue
        if block.ref_cnt < 0:
            problems.append(f"block {block.block_id} has ref_cnt {block.ref_cnt}")
        if times != (block.ref_cnt == 0):
            problems.append(f"block {block.block_id} with ref_cnt {block.ref_cnt} is in {times} queues")
        in_use += block.ref_cnt > 0
        key = block.block_hash
        if key is not None and not pool.cached_block_hash_to_block.contain(key, block.block_id):
            problems.append(f"block {block.block_id} is not found under its hash")
    if in_use + queue.num_free_blocks + 1 != pool.num_gpu_blocks:
        problems.append(f"{in_use} in use + {queue.num_free_blocks} free + 1 is not {pool.num_gpu_blocks}")
    return problems + _hash_map(pool)


def request_violations(scheduler: Scheduler) -> list[str]:
    """Return the contradictions between requests' block tables and the pool's reference counts, one line each."""
    manager = scheduler.kv_cache_manager
    places: Counter[int] = Counter()
    for group in manager.coordinator.single_type_managers:
        if group.block_pool is manager.block_pool:
            for blocks in group.req_to_blocks.values():
                places.update(block.block_id for block in blocks if not block.is_null)
    pool = manager.block_pool
    problems = [
        f"block {i} has {n} places in block tables and ref_cnt {pool.blocks[i].ref_cnt}"
        for i, n in places.items()
        if pool.blocks[i].ref_cnt < n
    ]
    if not scheduler.requests and not places and not _waits_to_be_freed(scheduler):
        held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        problems += [f"no request is left and {held} blocks are not free"] if held else []
    return problems


def check(scheduler: Scheduler) -> list[str]:
    """Return all violations in a scheduler's pool; for use between two steps."""
    pool = scheduler.kv_cache_manager.block_pool
    return violations(pool) + request_violations(scheduler)


def install() -> None:
    """If KVTUNE_AUDIT is set, check every scheduler built from now on, after each of its steps."""
    if os.environ.get("KVTUNE_AUDIT") not in ("1", "raise"):
        return
    from vllm.v1.core.sched.scheduler import Scheduler

    STATE.patches.after(PART, Scheduler, "__init__", watch)


def watch(scheduler: Scheduler) -> None:
    """Check this scheduler after each of its steps."""

    def audited(*args: object, **options: object) -> Outputs:
        result = type(scheduler).update_from_output(scheduler, *args, **options)
        try:
            problems = check(scheduler)
        except Exception as error:
            problems = [f"the audit failed: {error!r}"]
        state.count("audits")
        if problems:
            report(problems)
        return result

    # Set on the instance, so that it still runs after the scheduler's class was replaced.
    scheduler.update_from_output = audited


def report(violations: list[str]) -> None:
    """Count and log the violations; raise KvtuneError with KVTUNE_AUDIT=raise."""
    state.count("audit_violations", len(violations))
    state.note(f"audit: {violations[0]}")
    logger.error("kvtune audit: %s", "; ".join(violations[:10]))
    if os.environ.get("KVTUNE_AUDIT") == "raise":
        raise KvtuneError(
            f"audit: {violations[0]}", "report it with the run's command; KVTUNE_AUDIT=1 only counts"
        )


def _walk(queue: FreeQueue, most: int) -> tuple[list[int], str]:
    """Return the block ids from head to tail, and what is wrong with the links (empty: nothing)."""
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
            return ids, "its links form a cycle"
        previous, block = block, block.next_free_block
    return ids, "" if block is not None else "its links end before the tail"


def _hash_map(pool: BlockPool) -> list[str]:
    problems = []
    for key, entry in pool.cached_block_hash_to_block._cache.items():
        for block in entry.values() if isinstance(entry, dict) else (entry,):
            others = pool.cached_block_hashes_by_block.get(block.block_id, ())
            if block.block_hash != key and key not in others:
                problems.append(f"block {block.block_id} is found under a hash that it does not have")
    return problems


def _waits_to_be_freed(scheduler: Scheduler) -> bool:
    """Whether blocks of finished requests are still in use until a step in flight ends."""
    return bool(scheduler.deferred_frees)
