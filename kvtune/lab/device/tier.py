"""A host-memory tier for an engine without a model: copies take time, but move no data.

vLLM's OffloadingConnector runs as it is: its scheduler's side, manager and policies, and the worker's bookkeeping. Only
the worker that copies is replaced, by one that queues copies in each direction, on the simulator's virtual clock or,
with `--on host`, on the machine's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import reduce
from typing import Any, Protocol

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MambaSpec, iter_layer_specs
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.outputs import KVConnectorOutput

from kvtune.base.errors import UsageError
from kvtune.lab.device.cost import CopyTime
from kvtune.plugin.vllm.types import SchedulerOutput


class DeviceClock(Protocol):
    """`device_free_s`: when the device will have done all the steps that it was given."""

    device_free_s: float


class Queue(deque[tuple[float, float, int, int]]):
    """The copies in one direction: end, length, bytes, job. `free_s`: when the last ends."""

    free_s = 0.0


class Copies(OffloadingWorker):  # type: ignore[misc]
    """Runs copies in the order in which they were submitted, with one queue for each direction."""

    def __init__(self, clock: DeviceClock, copy: CopyTime, page_bytes: list[int]) -> None:
        self._clock, self._copy, self._page_bytes = clock, copy, page_bytes
        self.submitted_s = 0.0
        """The earliest time at which a copy that is submitted now may start."""
        self.now_s = 0.0
        self._stores, self._loads = Queue(), Queue()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._submit(self._stores, job_id, src_spec, self._copy.store_gib_s)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._submit(self._loads, job_id, dst_spec, self._copy.load_gib_s)

    def _submit(self, queue: Queue, job_id: int, blocks: GPULoadStoreSpec, gib_s: float) -> bool:
        size = sum(n * page for n, page in zip(blocks.group_sizes, self._page_bytes, strict=True))
        length = self._copy.seconds(size, gib_s)
        # Blocks are stored once the steps that fill them are done; loads wait for earlier writes to their blocks.
        queue.free_s = max(self.submitted_s, self._clock.device_free_s, queue.free_s) + length
        queue.append((queue.free_s, length, size, job_id))
        return True

    def get_finished(self) -> list[TransferResult]:
        done = []
        for queue in (self._stores, self._loads):
            while queue and queue[0][0] <= self.now_s:
                _, length, size, job_id = queue.popleft()
                done.append(TransferResult(job_id, True, size, length))
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Delay the next step until these copies are done."""
        ends = [end for queue in (self._stores, self._loads) for end, _, _, job in queue if job in job_ids]
        self._clock.device_free_s = max([self._clock.device_free_s, *ends])

    def next_end_s(self) -> float | None:
        """Return when the next copy ends, in seconds of the clock; None if no copy runs or waits."""
        return min((queue[0][0] for queue in (self._stores, self._loads) if queue), default=None)


class Tier:
    """The worker's side of an engine's connector. Call `before`, then `after` for each step, as a worker does."""

    def __init__(self, vllm_config: Any, cache: KVCacheConfig, clock: DeviceClock, copy: CopyTime) -> None:
        self._connector = OffloadingConnector(vllm_config, KVConnectorRole.WORKER, cache)
        self.copies = Copies(clock, copy, page_bytes(cache))
        self._worker = self._connector.connector_worker
        self._worker.worker = self.copies
        self._ranks = int(vllm_config.parallel_config.world_size)

    def before(self, step: SchedulerOutput, now_s: float) -> None:
        """Handle preemptions: blocks that are about to be overwritten are stored first."""
        self.copies.submitted_s = now_s
        self._connector.handle_preemptions(step.kv_connector_metadata)

    def after(self, step: SchedulerOutput, at_s: float) -> KVConnectorOutput:
        """Start new copies, and return those that are done.

        `at_s`: when the step was started (asynchronous scheduling) or was done (synchronous).
        """
        connector, copies = self._connector, self.copies
        copies.submitted_s = copies.now_s = at_s
        connector.bind_connector_metadata(step.kv_connector_metadata)
        connector.start_load_kv(None)
        connector.wait_for_save()
        output = KVConnectorOutput()
        results = connector.get_transfer_results(step.finished_req_ids)
        output.finished_sending, output.finished_recving = results.finished_sending, results.finished_recving
        output.failed_recving = results.failed_recving
        meta = connector.build_connector_worker_meta()
        if meta is not None:  # each rank copies its share of a block at the same time, and says so
            output.kv_connector_worker_meta = reduce(type(meta).aggregate, [meta] * self._ranks)
        connector.clear_connector_metadata()
        return output

    def quiet(self, connector: Any) -> bool:
        """Whether no copy runs or waits, and decode steps start no copies. `connector`: the scheduler's."""
        return (
            self.copies.next_end_s() is None
            and not self._worker._unsubmitted_store_jobs
            and not connector.connector_scheduler._jobs
            and bool(self._worker.spec.offload_prompt_only)
        )


def tier_of(vllm_config: Any, cache: KVCacheConfig, clock: DeviceClock, copy: CopyTime) -> Tier | None:
    """Make the engine's tier; None without a KV connector. UsageError for connectors other than vLLM's offloading."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None or not transfer.kv_connector:
        return None
    spec = transfer.kv_connector_extra_config.get("spec_name", "CPUOffloadingSpec")
    if transfer.kv_connector != "OffloadingConnector" or spec not in (
        "CPUOffloadingSpec",
        "MemcpyOffloadingSpec",
        "ReuseOffloadingSpec",
    ):
        raise UsageError(
            f"the simulator does not know the KV connector {transfer.kv_connector} ({spec})",
            "it knows vLLM's own offloading to host memory: --kv-offloading-size GIB",
        )
    return Tier(vllm_config, cache, clock, copy)


def page_bytes(cache: KVCacheConfig) -> list[int]:
    """Return the bytes copied for a block of each offloaded group: its layers' pages without padding."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import get_offloading_group_ids

    return [
        sum(_unpadded(spec) for spec in iter_layer_specs(group.kv_cache_spec)) * _layers(group)
        for group in (cache.kv_cache_groups[index] for index in get_offloading_group_ids(cache))
    ]


def _layers(group: Any) -> int:
    """Return how many layers each spec of the group stands for."""
    specs = len(list(iter_layer_specs(group.kv_cache_spec)))
    return len(group.layer_names) if specs == 1 else 1


def _unpadded(spec: Any) -> int:
    if isinstance(spec, MambaSpec):
        return int(replace(spec, page_size_padded=None).page_size_bytes)
    if isinstance(spec, AttentionSpec):
        return int(spec.unpadded_page_size_bytes)
    return int(spec.page_size_bytes)
