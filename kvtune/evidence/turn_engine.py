"""One side of an interleaved A/B: vLLM's EngineCore with its worker, without a front end.

Run as `python -m kvtune.evidence.turn_engine PLAN` (turns.py starts it): reads a seed per line, answers each with one
JSON object of figures.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.request import Request

    from kvtune.workload.types import Request as Planned
    from kvtune.workload.types import Workload


class TurnPlan(msgspec.Struct, forbid_unknown_fields=True):
    """What a side serves in every turn, and vLLM's flags."""

    model: str
    workload: str
    args: list[str]


class _Timed:
    """Time in the garbage collector and in the scheduler since `clear`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.clear()
        for name in ("schedule", "update_from_output"):
            setattr(scheduler, name, self._timed(name, getattr(scheduler, name)))
        gc.callbacks.append(self._collected)

    def clear(self) -> None:
        self.collections = [0, 0, 0]
        self.pause_s = 0.0
        self.taken_s = {"schedule": 0.0, "update_from_output": 0.0}
        self.steps = 0

    def _timed(self, name: str, method: Callable[..., object]) -> Callable[..., object]:
        def timed(*args: object, **named: object) -> object:
            begun = perf_counter()
            output = method(*args, **named)
            self.taken_s[name] += perf_counter() - begun
            self.steps += name == "schedule"
            return output

        return timed

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = perf_counter()
        else:
            self.pause_s += perf_counter() - self._begun
            self.collections[info["generation"]] += 1


def _build(plan: TurnPlan) -> EngineCore:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    from kvtune.engine.front_end.config import engine_config, parse_engine_args
    from kvtune.engine.resolve import resolve

    config = engine_config(parse_engine_args(resolve(plan.model, dummy=True, engine_args=plan.args).args))
    return EngineCore(config, Executor.get_class(config), log_stats=False)


@dataclass(slots=True)
class _Served:
    """One turn's requests by position: when each was sent and answered first, its hit tokens."""

    sent_s: list[float]
    first_s: list[float]
    hits: list[int]
    tokens: int = 0
    wall_s: float = 0.0


def _turn(engine: EngineCore, plan: TurnPlan, timed: _Timed, seed: int) -> dict[str, object]:
    """One turn: the workload with this seed, on an empty prefix cache. Figures are named as in a run's summary."""
    from kvtune.workload.spec import build

    workload = build(plan.workload, seed=seed)
    requests = _requests(engine, workload)
    engine.reset_prefix_cache()
    gc.collect()
    timed.clear()
    served = _serve(engine, requests, workload.concurrency or len(requests))
    return {
        "engine": _device(),
        "wall_s": served.wall_s,
        "throughput_tok_s": served.tokens / served.wall_s,
        "step_ms": {"mean": 1e3 * served.wall_s / timed.steps},
        "host_us": {
            name.partition("_")[0]: 1e6 * taken_s / timed.steps for name, taken_s in timed.taken_s.items()
        },
        "gc": {
            "engine_core": {
                "collections": timed.collections,
                "pause_ms": {"total": 1e3 * timed.pause_s},
                "share_of_step": timed.pause_s / served.wall_s,
            }
        },
        "rounds": _rounds(workload.requests, served),
    }


def _serve(engine: EngineCore, requests: list[Request], concurrency: int) -> _Served:
    """Step the engine until every request has finished, at most `concurrency` of them in flight."""
    count = len(requests)
    served = _Served([0.0] * count, [0.0] * count, [0] * count)
    next_one = in_flight = 0
    begun = perf_counter()
    while in_flight or next_one < count:
        while next_one < count and in_flight < concurrency:
            served.sent_s[next_one] = perf_counter()
            engine.add_request(requests[next_one])
            next_one += 1
            in_flight += 1
        outputs, _ = engine.step_fn()
        now = perf_counter()
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                index = int(output.request_id.rpartition("-")[2])
                served.first_s[index] = served.first_s[index] or now
                served.tokens += len(output.new_token_ids)
                if output.prefill_stats is not None:
                    served.hits[index] = output.prefill_stats.num_cached_tokens
                in_flight -= output.finish_reason is not None
    served.wall_s = perf_counter() - begun
    return served


def _rounds(planned: Sequence[Planned], served: _Served) -> list[dict[str, float]]:
    rounds: list[dict[str, float]] = []
    for number in range(max((r.round for r in planned), default=-1) + 1):
        members = [i for i, r in enumerate(planned) if r.round == number]
        waits_s = [served.first_s[i] - served.sent_s[i] for i in members]
        rounds.append(
            {
                "ttft_ms_mean": 1e3 * sum(waits_s) / len(members),
                "hit_tokens": sum(served.hits[i] for i in members),
            }
        )
    return rounds


def _device() -> dict[str, str]:
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    return {"device": kind, "device_name": "" if kind == "cpu" else current_platform.get_device_name()}


def _requests(engine: EngineCore, workload: Workload) -> list[Request]:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    from kvtune.workload.tokens import prompt_ids

    config = engine.vllm_config
    hasher = get_request_block_hasher(
        engine.scheduler.hash_block_size, get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
    )
    vocabulary = config.model_config.get_vocab_size()
    return [
        Request(
            request_id=f"{workload.seed}-{i}",
            prompt_token_ids=prompt_ids(planned.prompt, workload.seed, vocabulary),
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=planned.output_tokens, ignore_eos=True, detokenize=False
            ),
            pooling_params=None,
            arrival_time=time(),
            block_hasher=hasher,
        )
        for i, planned in enumerate(workload.requests)
    ]


def main() -> None:
    from kvtune.probe.lifetime import die_with_parent

    die_with_parent(signal.SIGKILL)
    plan = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=TurnPlan)
    with os.fdopen(os.dup(1), "wb", buffering=0) as out:
        os.dup2(2, 1)  # vLLM's prints go to the log, not among the answers
        engine = _build(plan)
        timed = _Timed(engine.scheduler)
        out.write(b"{}\n")
        for line in sys.stdin:
            out.write(msgspec.json.encode(_turn(engine, plan, timed, int(line))) + b"\n")


if __name__ == "__main__":
    main()
