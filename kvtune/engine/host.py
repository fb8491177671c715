"""The host: vLLM's front-end process, started by launch.py as `python -m kvtune.engine.host FOLDER EVENTS_FD`.

Builds AsyncLLM with vLLM's argument parser, warms it up, runs the workload, and sends events over a pipe. Its standard
output and error are the engine's log. SIGTERM and SIGINT end the measuring phase early; its results are kept.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic_ns
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from kvtune.core.vllm_config import VllmConfig
from kvtune.device.settings import TIMED, read_device
from kvtune.engine.driver import Driver, RequestLog, unless_dead
from kvtune.engine.messages import (
    COUNTS_FILE,
    PLAN_FILE,
    RECEIPTS_FILE,
    REQUESTS_FILE,
    ROUTES_FILE,
    Event,
    HostPlan,
)
from kvtune.engine.vllm_counts import Routes, TierHits, VllmCounts
from kvtune.errors import KvtuneError, UsageError
from kvtune.probe.lifetime import die_with_parent
from kvtune.probe.phase import CULPRITS, MEASURING, OVER, Phase
from kvtune.probe.status import FRONT_END
from kvtune.workload.spec import build
from kvtune.workload.types import Request, Span, Workload

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

WARM_UP_STREAM = (1 << 61) + 1
PROGRESS_S = 0.25


class Reporter:
    """The writing end of the event pipe. If the launcher has ended, the run is lost: the host stops itself."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def send(self, event: Event) -> None:
        try:
            os.write(self._descriptor, msgspec.json.encode(event) + b"\n")
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGTERM)


def parse_engine_args(arguments: list[str]) -> AsyncEngineArgs:
    """vLLM's AsyncEngineArgs from its flags. UsageError with the parser's message where it refuses them."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> None:
            raise UsageError(
                f"vLLM refuses these engine arguments: {message}",
                "after `--`, give flags of `vllm serve`",
            )

    parser = AsyncEngineArgs.add_cli_args(Parser(prog="vllm"))
    return AsyncEngineArgs.from_cli_args(parser.parse_args(arguments))


def check_fits(workload: Workload, max_model_len: int) -> None:
    """UsageError for a workload with a request longer than `max_model_len`, before the engine starts."""
    over = [r for r in workload.requests if r.prompt_tokens + r.output_tokens > max_model_len]
    if over:
        worst = max(over, key=lambda r: r.prompt_tokens + r.output_tokens)
        raise UsageError(
            f"{len(over)} of {len(workload.requests)} requests exceed max-model-len {max_model_len}; the longest, "
            f"{worst.id}, has {worst.prompt_tokens} prompt + {worst.output_tokens} output tokens",
            "shorten the workload, or raise `-- --max-model-len` where the model allows it",
        )


def warm_up_workload(workload: Workload, max_model_len: int) -> Workload:
    """A few requests of the workload's lengths, on tokens that the workload never uses."""
    picked = sorted(workload.requests, key=lambda r: r.prompt_tokens)
    shapes = {r.prompt_tokens for r in (picked[0], picked[len(picked) // 2], picked[-1])} if picked else set()
    requests = tuple(
        Request(f"warm-up-{i}", (Span(WARM_UP_STREAM + i, 0, min(n, max_model_len - 8)),), 4)
        for i, n in enumerate(sorted(shapes))
    )
    return Workload("warm-up", "warm-up", {}, workload.seed, requests, "", concurrency=max(1, len(requests)))


def describe_engine(config: VllmConfig) -> dict[str, object]:
    """The engine's configuration as vLLM resolved it at start-up."""
    import torch
    import vllm
    from vllm.platforms import current_platform

    cache, scheduler, parallel, model = (
        config.cache_config,
        config.scheduler_config,
        config.parallel_config,
        config.model_config,
    )
    backend = parallel.distributed_executor_backend
    executor = backend if isinstance(backend, str) else getattr(backend, "__name__", str(backend))
    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": str(current_platform.device_type),
        "device_name": str(current_platform.get_device_name() or ""),
        "executor": executor.rpartition(".")[2],
        "block_size": int(cache.block_size),
        "num_blocks": int(cache.num_gpu_blocks or 0),
        "max_model_len": int(model.max_model_len),
        "async_scheduling": bool(scheduler.async_scheduling),
        "settings": {
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "prefill_schedule_interval": getattr(scheduler, "prefill_schedule_interval", None),
            "stream_interval": scheduler.stream_interval,
            "enable_prefix_caching": bool(cache.enable_prefix_caching),
            "enable_chunked_prefill": bool(scheduler.enable_chunked_prefill),
            "prefix_cache_retention_interval": getattr(cache, "prefix_cache_retention_interval", None),
            "prefix_match_unit": getattr(cache, "prefix_match_unit", None),
            "kv_cache_dtype": str(cache.cache_dtype),
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
            "enforce_eager": bool(model.enforce_eager),
        },
        "model_config": model.hf_config.to_dict() if hasattr(model.hf_config, "to_dict") else {},
    }


async def serve(plan: HostPlan, folder: Path, reporter: Reporter) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    workload = build(plan.workload, seed=plan.seed)
    arguments = parse_engine_args(plan.vllm_args)
    config = arguments.create_engine_config()
    device = read_device() if plan.on_device else None
    if device is not None:
        from kvtune.device.shape import shape

        shape(config, device, asynchronous=arguments.async_scheduling is not False)
    max_model_len = int(config.model_config.max_model_len)
    check_fits(workload, max_model_len)
    counts = VllmCounts()
    engine = AsyncLLM.from_vllm_config(
        config, stat_loggers=[counts.factory()], disable_log_stats=False, enable_log_requests=False
    )
    routes = Routes(engine.engine_core)
    tier_hits = TierHits(engine.output_processor).by_request if config.kv_transfer_config else {}
    vocab = int(config.model_config.get_vocab_size())
    children = multiprocessing.active_children()
    try:
        facts = describe_engine(engine.vllm_config)
        if device is not None:
            facts |= {"device": TIMED, "device_name": device.name}
        reporter.send(Event(kind="engine", facts=_jsonable(facts)))
        if plan.warm_up:
            reporter.send(Event(kind="phase", name="warm-up"))
            warm = Driver(
                engine,
                warm_up_workload(workload, max_model_len),
                vocab,
                RequestLog(folder / "warm-up.bin"),
            )
            await unless_dead(engine, warm.run(lambda start_ns: None))
            if warm.failure is not None:
                raise warm.failure
            await unless_dead(engine, engine.reset_prefix_cache(reset_connector=True))
            tier_hits.clear()
        driver = Driver(engine, workload, vocab, RequestLog(folder / REQUESTS_FILE), tier_hits)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, driver.stop)
        counts.reset()
        routes.reset()
        watch = asyncio.create_task(_watch(driver, counts, folder, reporter))
        phase = Phase(folder)

        def measuring(start: int) -> None:
            phase.enter(MEASURING)
            reporter.send(Event(kind="phase", name="measuring", at_ns=start))

        await unless_dead(engine, driver.run(measuring))
        end = monotonic_ns()
        await asyncio.sleep(
            0.05
        )  # vLLM's output handler logs a step's statistics after it hands out the tokens
        watch.cancel()
        routes.write(folder / ROUTES_FILE)
        _progress(driver, counts, folder, reporter)
        if driver.failure is not None:
            raise driver.failure
        reporter.send(Event(kind="phase", name="finishing", at_ns=end))
        level = os.environ.get("KVTUNE_PROBE", "off")
        if level == "sites" and not driver.stopped:
            phase.enter(CULPRITS)
            await unless_dead(engine, engine.reset_prefix_cache(reset_connector=True))
            second = Driver(engine, workload, vocab, RequestLog(folder / "culprits.bin"))
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, second.stop)
            culprits = second.run(lambda at: reporter.send(Event(kind="phase", name="culprits", at_ns=at)))
            await unless_dead(engine, culprits)
            why = f"the second pass (allocation sites) failed: {second.failure}" if second.failure else ""
            reporter.send(Event(kind="phase", name="over", at_ns=monotonic_ns(), message=why))
        phase.enter(OVER)
        await _tallies_written(level, folder)
    except Exception:
        reporter.send(Event(kind="died", codes=_ended(children)))
        raise
    finally:
        # EngineCore of vLLM 0.32 does not react to SIGTERM in time even without an error. Its workers end with it.
        engine.shutdown(timeout=1.0)
    reporter.send(Event(kind="done"))


def _ended(children: Sequence[BaseProcess]) -> dict[str, int]:
    """Exit codes of those that have ended, by name; negative: the signal that killed it."""
    for child in children:
        child.join(timeout=0.2)
    return {child.name: child.exitcode for child in children if child.exitcode is not None}


async def _tallies_written(level: str, folder: Path) -> None:
    """Wait until the processes' probes have written their counts."""
    if level != "off":
        await asyncio.sleep(0.3)
    if level == "full":
        processes = len(list(folder.glob("status-*.json")))
        for _ in range(300):
            if len(list(folder.glob("growth-*.json"))) >= processes:
                return
            await asyncio.sleep(0.1)


async def _watch(driver: Driver, counts: VllmCounts, folder: Path, reporter: Reporter) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        _progress(driver, counts, folder, reporter)


def _progress(driver: Driver, counts: VllmCounts, folder: Path, reporter: Reporter) -> None:
    counts.write(folder / COUNTS_FILE)
    counts.write_receipts(folder / RECEIPTS_FILE)
    reporter.send(
        Event(
            kind="progress",
            sent=driver.sent,
            finished=driver.finished,
            output_tokens=driver.output_tokens,
            hit_tokens=driver.hit_tokens,
            query_tokens=driver.query_tokens,
        )
    )


def _jsonable(facts: dict[str, object]) -> dict[str, object]:
    """Values that JSON does not have (dtypes, enums) become text."""
    plain: dict[str, object] = msgspec.json.decode(msgspec.json.encode(facts, enc_hook=str))
    return plain


def _unwind(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> None:
    folder = Path(sys.argv[1])
    reporter = Reporter(int(sys.argv[2]))
    os.environ[FRONT_END] = str(os.getpid())
    # Until the driver handles these signals, they raise SystemExit, so that the engine is shut down.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _unwind)
    die_with_parent(signal.SIGTERM)
    plan = msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=HostPlan)
    try:
        reporter.send(Event(kind="phase", name="starting"))
        asyncio.run(serve(plan, folder, reporter))
    except KvtuneError as error:
        reporter.send(Event(kind="failed", message=error.message, hint=error.hint, exit_code=error.exit_code))
        sys.exit(error.exit_code)
    except Exception as error:
        import traceback

        traceback.print_exc()
        reporter.send(Event(kind="failed", name=type(error).__name__, message=str(error)))
        sys.exit(1)


if __name__ == "__main__":
    main()
