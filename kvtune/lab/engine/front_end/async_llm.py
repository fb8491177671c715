"""Runs AsyncLLM, vLLM's front end, in the host process, with the driver that sends requests to it.

Each request iterates `AsyncLLM.generate`, as in vLLM's API server.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from math import nan
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING

from kvtune.lab.device.settings import TIMED
from kvtune.lab.engine.driver import Answer, Driver, RequestLog
from kvtune.lab.engine.front_end.config import describe_engine, engine_config, jsonable, parse_engine_args
from kvtune.lab.engine.messages import COUNTS_FILE, RECEIPTS_FILE, ROUTES_FILE, HostPlan
from kvtune.lab.engine.vllm_counts import Routes, TierHits, VllmCounts
from kvtune.requests.types import Request, Workload

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


class InProcess:
    """The front end in the host process. `fits` checks the longest request before the engine starts."""

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
        self._engine: AsyncLLM = AsyncLLM.from_vllm_config(
            config, stat_loggers=[self._counts.factory()], disable_log_stats=False, enable_log_requests=False
        )
        self._routes = Routes(self._engine.engine_core)
        tier = bool(config.kv_transfer_config)
        self._tier_hits = TierHits(self._engine.output_processor).by_request if tier else {}
        self._vocab = int(config.model_config.get_vocab_size())
        self._children = multiprocessing.active_children()
        self.facts = jsonable(describe_engine(self._engine.vllm_config))
        if device is not None:
            self.facts |= {"device": TIMED, "device_name": device.name}

    @property
    def errored(self) -> bool:
        return bool(self._engine.errored)

    @property
    def dead_error(self) -> BaseException:
        error: BaseException = self._engine.dead_error
        return error

    def warm_up(self, workload: Workload) -> Workload:
        return workload

    def driver(self, workload: Workload, log: RequestLog) -> AsyncDriver:
        return AsyncDriver(self._engine, workload, self._vocab, log, self._tier_hits)

    async def forget(self) -> None:
        await self._engine.reset_prefix_cache(reset_connector=True)

    async def begin(self) -> None:
        self._tier_hits.clear()
        self._counts.reset()
        self._routes.reset()

    def keep(self) -> None:
        self._counts.write(self._folder / COUNTS_FILE)
        self._counts.write_receipts(self._folder / RECEIPTS_FILE)

    async def end(self) -> None:
        await asyncio.sleep(
            0.05
        )  # vLLM's output handler logs a step's statistics after it hands out the tokens
        self._routes.write(self._folder / ROUTES_FILE)
        self.keep()

    def died(self) -> dict[str, int]:
        for child in self._children:
            child.join(timeout=0.2)
        return {child.name: child.exitcode for child in self._children if child.exitcode is not None}

    async def close(self) -> None:
        # EngineCore of vLLM 0.32 does not react to SIGTERM in time even without an error. Its workers end with it.
        self._engine.shutdown(timeout=1.0)


class AsyncDriver(Driver):
    """Sends requests to AsyncLLM, which delivers the tokens of each step as they come."""

    def __init__(
        self,
        engine: AsyncLLM,
        workload: Workload,
        vocab_size: int,
        log: RequestLog,
        tier_hits: dict[str, int],
    ) -> None:
        super().__init__(workload, vocab_size, log, tier_hits)
        self._engine = engine

    def says_dead(self, error: Exception) -> bool:
        return type(error).__name__ == "EngineDeadError"

    async def ask(self, index: int, request: Request, ids: list[int], answer: Answer) -> None:
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.output_tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            detokenize=self._engine.tokenizer is not None,
        )
        times, counts, made, tokens = answer.times, answer.counts, answer.made, answer.tokens
        async for output in self._engine.generate(tokens_input(ids), params, str(index)):
            now = monotonic_ns()
            if output.num_cached_tokens is not None:
                answer.hits = output.num_cached_tokens
            for part in output.outputs:
                new = len(part.token_ids)
                if new:
                    times.append(now)
                    counts.append(new)
                    made.append(getattr(output.metrics, "last_token_ts", nan))  # no metrics: no time
                    self.output_tokens += new
                    tokens.extend(part.token_ids)
                if part.finish_reason is not None:
                    answer.finish = str(part.finish_reason)
            if output.finished:
                answer.ended = now
