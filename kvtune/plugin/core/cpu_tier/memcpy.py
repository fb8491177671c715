"""A host-memory tier for CPU engines: copies within memory, done as soon as they are submitted.

The scheduler's side is vLLM's own CPUOffloadingSpec, unchanged: it stores, evicts and loads the chunks that it would
on a GPU whose copies take no time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class MemcpyOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec for host memory, with a worker that needs no GPU."""

    _worker: OffloadingWorker | None

    def _uses_shared_region(self) -> bool:
        return False

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            self._worker = MemcpyWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies between the KV cache and a tier of `chunks` chunks, each of `blocks_per_chunk` blocks."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, chunks: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = [
            [(ref.tensor_idx, ref.page_size_bytes) for ref in refs] for refs in kv_caches.group_data_refs
        ]
        self._cache = [tensor.tensor.view(torch.int8) for tensor in kv_caches.tensors]
        self._tier = [
            torch.zeros((chunks * blocks_per_chunk, tensor.page_size_bytes), dtype=torch.int8)
            for tensor in kv_caches.tensors
        ]
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, self._cache, self._tier, to_tier=True)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, self._tier, self._cache, to_tier=False)

    def _copy(
        self,
        job_id: int,
        blocks: GPULoadStoreSpec,
        chunks: Any,
        source: Sequence[torch.Tensor],
        target: Sequence[torch.Tensor],
        *,
        to_tier: bool,
    ) -> bool:
        began = time.perf_counter()
        copied = 0
        for refs, in_cache, in_tier in zip(self._refs, *self._rows(blocks, chunks.block_ids), strict=True):
            if not len(in_cache):
                continue
            here, there = torch.from_numpy(in_cache), torch.from_numpy(in_tier)
            read, written = (here, there) if to_tier else (there, here)
            for tensor, size in refs:
                target[tensor][written, :size] = source[tensor][read, :size]
                copied += len(in_cache) * size
        self._finished.append(TransferResult(job_id, True, copied, time.perf_counter() - began))
        return True

    def _rows(
        self, blocks: GPULoadStoreSpec, chunk_ids: NDArray[np.int32]
    ) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        """Return for each group the blocks' rows in the KV cache, and the same blocks' rows in the tier."""
        per_chunk = self._blocks_per_chunk
        in_cache, in_tier = [], []
        place = chunk = 0
        for size, first in zip(blocks.group_sizes, blocks.block_indices, strict=True):
            in_cache.append(np.asarray(blocks.block_ids[place : place + size], dtype=np.int64))
            place += size
            # The first block may lie inside a chunk.
            skipped = first % per_chunk
            used = -(-(size + skipped) // per_chunk) if size else 0
            rows = chunk_ids[chunk : chunk + used].astype(np.int64)[:, None] * per_chunk + np.arange(
                per_chunk
            )
            in_tier.append(rows.ravel()[skipped : skipped + size])
            chunk += used
        return in_cache, in_tier

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: copies are done when they are submitted."""
