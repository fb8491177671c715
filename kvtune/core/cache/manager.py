"""Lets window groups keep the last window of an output when its request ends. Runs in EngineCore."""

from __future__ import annotations

import logging

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from kvtune.core import state
from kvtune.core.cache.windows import KeepingWindowManager
from kvtune.core.vllm_types import KVCacheBlock

logger = logging.getLogger("vllm.kvtune")


class KeepingManager(KVCacheManager):  # type: ignore[misc]
    """Stock's manager, except that it acts just before a request's blocks are freed."""

    keeps_output: tuple[KeepingWindowManager, ...]

    def free(self, request: Request) -> None:
        self._keep_output(request)
        super().free(request)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        self._keep_output(request)
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request)
        return blocks

    def _keep_output(self, request: Request) -> None:
        try:
            for group in self.keeps_output:
                group.keep_output(request)
        except Exception as error:
            self.keeps_output = ()
            state.part("output_window", False, f"switched off: {error!r}")
            logger.error("kvtune: the last window of outputs is no longer kept", exc_info=error)
