"""Engines that are alive together and do the same work in turns, the others stopped: pairs of seconds, not of minutes.

`in_turns` (the CLI's process) starts one `python -m kvtune.evidence.turns PLAN` a side. Each holds vLLM's EngineCore
with its worker, without a front end, and answers every line (a seed) with one JSON object, named as in a run's summary.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, time
from typing import Any

import msgspec

from kvtune.engine.faults import cause
from kvtune.errors import KvtuneError
from kvtune.evidence.claims import Case, CaseSide
from kvtune.run.cpu import VARIABLE
from kvtune.run.scratch import scratch

WARM_TURNS = 1


class TurnPlan(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    workload: str
    args: list[str]


def in_turns(case: Case, on_turn: Callable[[int], None]) -> dict[str, list[dict[str, Any]]]:
    """What each side measured in each turn, by the side's name; a KvtuneError with an engine's words where it fails."""
    with contextlib.ExitStack() as stack:
        engines = {side.name: stack.enter_context(_Engine(case, side)) for side in case.sides}
        for engine in engines.values():
            engine.answer()  # it is ready
        for engine in engines.values():
            engine.pause()
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
        for turn in range(case.turns + WARM_TURNS):
            on_turn(turn)
            for name in list(engines) if turn % 2 else reversed(list(engines)):
                told = engines[name].turn(turn)
                if turn >= WARM_TURNS:
                    found[name].append(told)
    return found


class _Engine:
    """A side's processes: one session, stopped but in its turns."""

    def __init__(self, case: Case, side: CaseSide) -> None:
        self._case, self._side = case, side

    def __enter__(self) -> _Engine:
        self._scratch = scratch("turns")
        folder = self._scratch.__enter__()
        plan = TurnPlan(self._case.model, self._case.workload, [*self._case.args, *self._side.args])
        (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
        kept = (n for n in os.environ if n == VARIABLE or not n.startswith("KVTUNE_"))
        environment = {name: os.environ[name] for name in kept}
        environment |= {
            # A run of ours: its processes end with the one that started them, also where that one was killed.
            "KVTUNE_RUN_DIR": str(folder),
            "KVTUNE_PROBE": "off",
            "KVTUNE_CORE": self._side.core,
            "KVTUNE_STRICT": "1",
            "KVTUNE_SET": msgspec.json.encode(self._side.settings).decode(),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
        self._log = folder / "log"
        with self._log.open("wb") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvtune.evidence.turns", str(folder / "plan.json")],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._scratch.__exit__(None, None, None)

    def turn(self, seed: int) -> dict[str, Any]:
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended: there is no answer either
            self._process.stdin.write(f"{seed}\n".encode())
            self._process.stdin.flush()
        told = self.answer()
        self.pause()
        return told

    def pause(self) -> None:
        """An idle worker asks its queue for work again and again, on the core that another engine needs."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # its last words come after the end of its answers
                self._process.wait(10)
            why = cause(self._log.read_text(errors="replace"))
            raise KvtuneError(
                f"{self._case.name}, {self._side.name}: {why or 'its engine ended'}",
                "see whether it runs alone: the command stands beside the figure",
            )
        found: dict[str, Any] = msgspec.json.decode(line)
        return found


class _Timed:
    """What the process's collector and the scheduler take, between two readings."""

    def __init__(self, scheduler: Any) -> None:
        self.clear()
        for name in ("schedule", "update_from_output"):
            setattr(scheduler, name, self._timed(name, getattr(scheduler, name)))
        gc.callbacks.append(self._collected)

    def clear(self) -> None:
        self.collections = [0, 0, 0]
        self.pause_s = 0.0
        self.taken_s = {"schedule": 0.0, "update_from_output": 0.0}
        self.steps = 0

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
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


def _build(plan: TurnPlan) -> Any:
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.abstract import Executor

    from kvtune.engine.host import parse_engine_args
    from kvtune.engine.resolve import resolve

    config = parse_engine_args(
        resolve(plan.model, dummy=True, engine_args=plan.args).args
    ).create_engine_config()
    return EngineCore(config, Executor.get_class(config), log_stats=False)


def _serve(engine: Any, plan: TurnPlan, timed: _Timed, seed: int) -> dict[str, Any]:
    """One turn: the workload with this seed, on an empty prefix cache."""
    from kvtune.workload.spec import build

    workload = build(plan.workload, seed=seed)
    requests = _requests(engine, workload)
    at_once = workload.concurrency or len(requests)
    sent, first, hits = [0.0] * len(requests), [0.0] * len(requests), [0] * len(requests)
    engine.reset_prefix_cache()
    gc.collect()
    timed.clear()
    next_one = in_flight = tokens = 0
    begun = perf_counter()
    while in_flight or next_one < len(requests):
        while next_one < len(requests) and in_flight < at_once:
            sent[next_one] = perf_counter()
            engine.add_request(requests[next_one])
            next_one += 1
            in_flight += 1
        outputs, _ = engine.step_fn()
        now = perf_counter()
        for batch in (outputs or {}).values():
            for output in batch.outputs:
                index = int(output.request_id.rpartition("-")[2])
                first[index] = first[index] or now
                tokens += len(output.new_token_ids)
                if output.prefill_stats is not None:
                    hits[index] = output.prefill_stats.num_cached_tokens
                in_flight -= output.finish_reason is not None
    wall_s = perf_counter() - begun
    rounds = [
        [i for i, r in enumerate(workload.requests) if r.round == n]
        for n in range(_rounds(workload.requests))
    ]
    return {
        "engine": _device(),
        "wall_s": wall_s,
        "throughput_tok_s": tokens / wall_s,
        "step_ms": {"mean": 1e3 * wall_s / timed.steps},
        "host_us": {
            name.partition("_")[0]: 1e6 * taken_s / timed.steps for name, taken_s in timed.taken_s.items()
        },
        "gc": {
            "engine_core": {
                "collections": timed.collections,
                "pause_ms": {"total": 1e3 * timed.pause_s},
                "share_of_step": timed.pause_s / wall_s,
            }
        },
        "rounds": [
            {
                "ttft_ms_mean": 1e3 * sum(first[i] - sent[i] for i in members) / len(members),
                "hit_tokens": sum(hits[i] for i in members),
            }
            for members in rounds
        ],
    }


def _device() -> dict[str, str]:
    from vllm.platforms import current_platform

    kind = current_platform.device_type
    return {"device": kind, "device_name": "" if kind == "cpu" else current_platform.get_device_name()}


def _rounds(requests: Sequence[Any]) -> int:
    return max((r.round for r in requests), default=-1) + 1


def _requests(engine: Any, workload: Any) -> list[Any]:
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
        os.dup2(2, 1)  # what vLLM prints goes to the log
        engine = _build(plan)
        timed = _Timed(engine.scheduler)
        out.write(b"{}\n")
        for line in sys.stdin:
            out.write(msgspec.json.encode(_serve(engine, plan, timed, int(line))) + b"\n")


if __name__ == "__main__":
    main()
