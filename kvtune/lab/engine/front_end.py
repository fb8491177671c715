"""Runs AsyncLLM, vLLM's front end, in the host process."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvtune.lab.device.settings import TIMED
from kvtune.lab.engine.config import describe_engine, engine_config, jsonable, parse_engine_args
from kvtune.lab.engine.driver import Driver, RequestLog
from kvtune.lab.engine.messages import COUNTS_FILE, RECEIPTS_FILE, ROUTES_FILE, HostPlan
from kvtune.lab.engine.vllm_counts import Routes, TierHits, VllmCounts
from kvtune.requests.types import Workload

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class FrontEnd:
    """vLLM's front end, started. `facts`: the engine's configuration, for the run file.

    `fits` checks the longest request before the engine starts.
    """

    def __init__(self, plan: HostPlan, folder: Path, fits: Callable[[int], None]) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = parse_engine_args(plan.vllm_args)
        device = plan.device
        config = engine_config(arguments)
        if device is not None:
            from kvtune.lab.device.shape import shape

            shape(config, device, asynchronous=arguments.async_scheduling is not False)
        fits(int(config.model_config.max_model_len))
        self._folder = folder
        self._counts = VllmCounts()
        self.engine: AsyncLLM = AsyncLLM.from_vllm_config(
            config, stat_loggers=[self._counts.factory()], disable_log_stats=False, enable_log_requests=False
        )
        self._routes = Routes(self.engine.engine_core)
        tier = bool(config.kv_transfer_config)
        self._tier_hits = TierHits(self.engine.output_processor).by_request if tier else {}
        self._vocab = int(config.model_config.get_vocab_size())
        self._children = multiprocessing.active_children()
        self.facts = jsonable(describe_engine(self.engine.vllm_config))
        if device is not None:
            self.facts |= {"device": TIMED, "device_name": device.name}

    def driver(self, workload: Workload, log: RequestLog) -> Driver:
        return Driver(self.engine, workload, self._vocab, log, self._tier_hits)

    async def forget(self) -> None:
        """Drop all cached blocks, in the pool and in a tier of host memory."""
        await self.engine.reset_prefix_cache(reset_connector=True)

    async def begin(self) -> None:
        """Start to count; earlier counts are dropped."""
        self._tier_hits.clear()
        self._counts.reset()
        self._routes.reset()

    def keep(self) -> None:
        """Write the counts so far: a crash would lose them."""
        self._counts.write(self._folder / COUNTS_FILE)
        self._counts.write_receipts(self._folder / RECEIPTS_FILE)

    async def end(self) -> None:
        """Write the counts after all requests are answered."""
        # vLLM's output handler logs a step's statistics after it hands out the tokens.
        await asyncio.sleep(0.05)
        self._routes.write(self._folder / ROUTES_FILE)
        self.keep()

    def died(self) -> dict[str, int]:
        """Return the exit codes of the engine's processes that have ended, by process name."""
        for child in self._children:
            child.join(timeout=0.2)
        return {child.name: child.exitcode for child in self._children if child.exitcode is not None}

    async def close(self) -> None:
        # EngineCore of vLLM 0.32 does not react to SIGTERM in time even without an error. Its workers end with it.
        self.engine.shutdown(timeout=1.0)
