"""vLLM's connector for a tier of host memory, with less Python for each chunk. Simulator's process only.

Of models with one KV cache group of full attention, behind vLLM's LRU or kvtune's policy. Decisions, jobs and counts
are vLLM's. Left out is what no replay reads: chunk ids of copies, gauges, and records that neither policy asks for.
Written for the files of vLLM whose checksums stand here; with others vLLM's own code stays.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.utils import yield_req_data
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import _ConnectorMetricName
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
    TransferJobStatus,
    _create_req_context,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, PrepareStoreOutput
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.request import RequestStatus

from kvtune.core.compat.manifest import source_path
from kvtune.core.offload.policy import ReusePolicy
from kvtune.core.offload.spec import ReuseManager
from kvtune.sim.fast.tier import OrderedLru

KNOWN = {
    "vllm.v1.kv_offload.cpu.manager": "e403633a3092d508be5c66c1096f3a0349f6e3c425fe6e6800a6fd0603ee6a95",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler": (
        "f9e2f9ad8a637b54c88589ebc58353b236fafe6688def4b22b68f275decbbc6b"
    ),
}
"""By module: the checksum of its file in vLLM 0.32.0."""
GROUP_BYTES = 4


class Chunk:
    """ChunkStatus."""

    __slots__ = ("chunk_id", "ref_cnt")

    def __init__(self, chunk_id: int) -> None:
        self.ref_cnt = -1
        self.chunk_id = chunk_id

    @property
    def is_ready(self) -> bool:
        return self.ref_cnt >= 0


class Seen:
    """_RequestCacheAccess: the chunks that a request used, in the order of first use."""

    __slots__ = ("cache_generation", "finished", "keys", "owner")

    def __init__(self, owner: object, cache_generation: int) -> None:
        self.owner, self.cache_generation = owner, cache_generation
        self.keys: dict[bytes, None] = {}
        self.finished = False


class Blocks(GPULoadStoreSpec):  # type: ignore[misc]
    """The blocks of a copy, of one group: how many, and the first one's index."""

    def __init__(self, count: int, first: int) -> None:
        self.group_sizes, self.block_indices = [count], [first]


class QuickManager(CPUOffloadingManager):  # type: ignore[misc]
    """CPUOffloadingManager without events and without a store threshold."""

    _policy: Any
    _copied: LoadStoreSpec

    def _get_request_cache_access(self, req_context: Any) -> Seen:
        seen: Seen | None = req_context.get_state(Seen)
        if seen is None or seen.owner is not self or seen.cache_generation != self._cache_generation:
            seen = Seen(self, self._cache_generation)
            req_context.set_state(seen)
        return seen

    def _record_request_cache_access(
        self,
        keys: Iterable[bytes],
        req_context: Any,
        inserted_keys: Iterable[bytes] = (),
        reused_keys: Iterable[bytes] = (),
    ) -> None:
        self._get_request_cache_access(req_context).keys.update(dict.fromkeys(keys))

    def _get_load_store_spec(self, keys: Iterable[bytes], chunks: Iterable[object]) -> LoadStoreSpec:
        return self._copied

    def prepare_store(self, keys: Collection[bytes], req_context: Any) -> PrepareStoreOutput | None:
        policy = self._policy
        chunks: dict[bytes, Chunk] = policy.chunks
        new = [key for key in keys if key not in chunks]
        used: Iterable[bytes] = keys
        if len(new) < len(keys):
            used = [key for key in keys if (chunk := chunks.get(key)) is None or chunk.ref_cnt >= 0]
        self._get_request_cache_access(req_context).keys.update(dict.fromkeys(used))
        if not new:
            return PrepareStoreOutput(keys_to_store=[], store_spec=self._copied, evicted_keys=[])
        free_list: list[int] = self._free_list
        unused = self._num_chunks - self._num_allocated_chunks
        wanted = len(new) - len(free_list) - unused
        evicted_keys: list[bytes] = []
        if wanted > 0:
            evicted = policy.evict(wanted, set(keys)) if wanted <= self._num_evictable_cache_chunks else None
            if evicted is None:
                return None
            self._num_evictable_cache_chunks -= wanted
            free_list += [chunk.chunk_id for _, chunk in evicted]
            evicted_keys = [key for key, _ in evicted]
        fresh = min(len(new), unused)
        ids = list(range(self._num_allocated_chunks, self._num_allocated_chunks + fresh))
        self._num_allocated_chunks += fresh
        if reused := len(new) - fresh:
            ids += reversed(free_list[-reused:])
            del free_list[-reused:]
        policy.insert_all(new, map(Chunk, ids))
        self._num_write_pending_chunks += len(new)
        return PrepareStoreOutput(keys_to_store=new, store_spec=self._copied, evicted_keys=evicted_keys)

    def complete_store(self, keys: Collection[bytes], req_context: Any, success: bool = True) -> None:
        if not success:
            super().complete_store(keys, req_context, success)
            return
        chunks: dict[bytes, Chunk] = self._policy.chunks
        stored = 0
        for key in keys:
            chunk = chunks.get(key)
            if chunk is not None and chunk.ref_cnt < 0:
                chunk.ref_cnt = 0
                stored += 1
        self._num_write_pending_chunks -= stored
        self._num_evictable_cache_chunks += stored

    def on_request_finished(self, req_context: Any) -> None:
        seen: Seen | None = req_context.get_state(Seen)
        if seen is None or seen.cache_generation != self._cache_generation or seen.finished:
            return
        seen.finished = True
        self._policy.on_request_finished((seen.keys,), set(), set(), req_context)

    def get_stats(self) -> None:
        """Gauges for /metrics."""


class QuickReuseManager(ReuseManager, QuickManager):
    """ReuseManager."""


class State(RequestOffloadState):  # type: ignore[misc]
    """RequestOffloadState."""

    __slots__ = ()

    def update_offload_keys(self) -> None:
        ((group,), (state,)) = self.config.kv_group_configs, self.group_states
        keys, hashes, per_chunk = state.offload_keys, self.req.block_hashes, group.hashes_per_chunk
        have, whole = len(keys), len(hashes) // per_chunk
        if have < whole:
            suffix = group.group_idx.to_bytes(GROUP_BYTES, "big")
            new = [
                h + suffix for h in hashes[have * per_chunk + per_chunk - 1 : whole * per_chunk : per_chunk]
            ]
            keys += new
            tokens = group.tokens_per_chunk
            ends = range((have + 1) * tokens, (whole + 1) * tokens, tokens)
            self.req_context._offload_key_positions.update(zip(new, ends, strict=True))


class QuickSide(OffloadingConnectorScheduler):  # type: ignore[misc]
    """OffloadingConnectorScheduler of one group of full attention, whose chunks are blocks of a prompt."""

    def on_new_request(self, request: Any) -> None:
        context = _create_req_context(request)
        offloading = self.manager.on_new_request(context)
        self._req_status[request.request_id] = State(
            config=self.config, req=request, req_context=context, offloading_context=offloading
        )

    def _maximal_prefix_lookup(
        self, keys: Sequence[bytes], req_context: Any, req: Any, group_config: Any, start_chunk_idx: int
    ) -> int | None:
        chunks: dict[bytes, Chunk] = self.manager._policy.chunks
        hits = 0
        pending = False
        for key in keys:
            chunk = chunks.get(key)
            if chunk is None:
                break
            pending = pending or chunk.ref_cnt < 0
            hits += 1
        if isinstance(self.manager, ReuseManager):
            self.manager._policy.looked_up_in_order(keys, hits, req_context)
        return None if pending else hits

    def _update_req_states(self, scheduler_output: Any) -> None:
        told = self._current_batch_allocated_block_ids
        (group,) = self.config.kv_group_configs
        for req_id, groups, preempted in yield_req_data(scheduler_output):
            status = self._req_status[req_id]
            status.update_offload_keys()
            (state,) = status.group_states
            if preempted:
                state.block_ids.clear()
            if groups:
                new = groups[group.group_idx]
                state.block_ids.extend(new)
                told.update(filter(None, new))
        for copy in scheduler_output.kv_cache_block_copies or ():
            told.add(copy.dst_block_id)

    def _offers(self, scheduler_output: Any) -> Iterator[tuple[Any, int]]:
        """Requests of the step that may have chunks to offer, and their tokens after it."""
        for req_id in chain(scheduler_output.num_scheduled_tokens, scheduler_output.finished_req_ids or ()):
            status = self._req_status.get(req_id)
            if status is None:
                continue
            req = status.req
            if req.status is RequestStatus.FINISHED_ABORTED:
                tokens = req.num_computed_tokens
            elif req.is_finished():
                tokens = max(req.num_prompt_tokens, req.num_tokens - 1)
            else:
                tokens = req.num_computed_tokens + scheduler_output.num_scheduled_tokens[req_id]
            yield status, tokens

    def _build_store_jobs(self, scheduler_output: Any) -> dict[int, TransferJob]:
        jobs: dict[int, TransferJob] = {}
        (group,) = self.config.kv_group_configs
        for status, tokens in self._offers(scheduler_output):
            (state,) = status.group_states
            start, req = state.next_stored_chunk_idx, status.req
            offerable = min(tokens, req.num_prompt_tokens) // group.tokens_per_chunk
            if offerable <= start:
                continue
            offerable = self._calc_num_offloadable_tokens(status, tokens)
            end = status.storable_chunks(group, state, offerable)
            if end <= start:
                continue
            keys, block_ids = state.offload_keys[start:end], state.block_ids[start:end]
            assert 0 not in block_ids
            stores = self.manager.prepare_store(keys, status.req_context)
            if stores is None:
                self._connector_stats.increase_counter(_ConnectorMetricName.ALLOCATION_FAILURE)
                continue
            state.next_stored_chunk_idx = end
            if not stores.keys_to_store:
                continue
            stored = set(stores.keys_to_store)
            first = start
            if len(stored) < len(keys):
                kept = [n for n, key in enumerate(keys) if key in stored]
                first, block_ids = start + kept[0], [block_ids[n] for n in kept]
            job = self._generate_job_id()
            status.transfer_jobs.add(job)
            self._jobs[job] = TransferJobStatus(
                req_id=req.request_id,
                pending_count=self.config.num_workers,
                keys=stored,
                is_store=True,
                deferred_fence_block_ids=block_ids,
            )
            jobs[job] = TransferJob(
                req_id=req.request_id, src_spec=Blocks(len(block_ids), first), dst_spec=stores.store_spec
            )
            if req.is_finished():
                for block in block_ids:
                    self._block_id_to_pending_jobs.setdefault(block, set()).add(job)
                    if block in self._current_batch_allocated_block_ids:
                        self._current_batch_jobs_to_flush.add(job)
        return jobs


def adopt(side: Any) -> None:
    """Give a connector's new scheduler side and its manager these classes, where they stand for what it has."""
    if (
        type(side) is OffloadingConnectorScheduler
        and not side._req_status
        and fits(side)
        and quicken(side.manager)
    ):
        side.__class__ = QuickSide


def quicken(manager: Any) -> bool:
    """Give a new manager the class here that stands for its own; False where there is none."""
    policy = getattr(manager, "_policy", None)
    if type(manager) is CPUOffloadingManager and type(policy) is OrderedLru:
        manager.__class__ = QuickManager
    elif type(manager) is ReuseManager and type(policy) is ReusePolicy:
        manager.__class__ = QuickReuseManager
    else:
        return False
    manager._copied = CPULoadStoreSpec([])
    return True


def fits(side: Any) -> bool:
    config = side.config
    if len(config.kv_group_configs) != 1 or not config.offload_prompt_only or config.blocks_per_chunk != 1:
        return False
    (group,) = config.kv_group_configs
    manager = side.manager
    if not isinstance(manager, CPUOffloadingManager):
        return False
    return (
        group.sliding_window_size_in_chunks is None
        and not group.is_eagle_group
        and not group.requires_cow_source
        and not config.supports_partial_tail
        and not side._events_tracker.self_describing_enabled
        and manager.events is None
        and manager.counts is None
        and not manager._num_allocated_chunks
        and all(map(_is_known, KNOWN))
    )


def _is_known(module: str) -> bool:
    path = source_path(module)
    return path is not None and hashlib.sha256(path.read_bytes()).hexdigest() == KNOWN[module]
