"""Runs workloads on the real engine (random weights, CPU) and on the simulated one, step by step in one process.

A script: `python lockstep.py MODEL CASES.json OUT.json`. Both engines are EngineCore with a fresh scheduler for each
case; the real one computes real tokens and hashes them with vLLM's own hasher. Prints nothing; OUT holds, for each case
and core, the hits of each request and one digest a step from both sides.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"


def main(model: str, cases: list[dict[str, Any]], out: Path) -> None:
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.request import Request

    from kvtune.engine.host import parse_engine_args
    from kvtune.engine.resolve import resolve
    from kvtune.probe.kv_specs import capture
    from kvtune.sim import build
    from kvtune.sim.clock import VirtualClock, policies_see
    from kvtune.sim.cost import NOMINAL
    from kvtune.sim.executor import Done, Machine, SimExecutor
    from kvtune.sim.replay import Player
    from kvtune.sim.settings import SimSettings
    from kvtune.workload.spec import build as workload_of
    from kvtune.workload.tokens import prompt_ids

    class Timed(UniProcExecutor):
        """The real executor; its steps take the virtual time that a simulated one's do."""

        machine: Machine

        def _init_executor(self) -> None:
            super()._init_executor()
            self.requests: dict[str, Any] = {}
            self.on_step = None
            self.decode_tokens = 1
            self.cost_of_jump = None

        def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
            virtual = SimExecutor.execute_model(self, scheduler_output)
            real = super().execute_model(scheduler_output, non_block=True)
            return Done(self.machine.clock, virtual._end_s, real.result())

    class RealPlayer(Player):
        answers: dict[int, list[int]]

        def _send(self, index: int) -> None:
            planned = self._workload.requests[index]
            tokens = prompt_ids(planned.prompt, self._workload.seed, vocab, self.answers)
            self.journal.sent_s[index] = self._clock.now_s
            self._engine.add_request(
                Request(
                    request_id=str(index),
                    prompt_token_ids=tokens,
                    sampling_params=self._factory._sampling(planned.output_tokens),
                    pooling_params=None,
                    arrival_time=self._clock.now_s,
                    block_hasher=hasher,
                )
            )

        def _take(self, outputs: Any) -> bool:
            for batch in (outputs or {}).values():
                for output in batch.outputs:
                    self.answers.setdefault(int(output.request_id), []).extend(output.new_token_ids)
            return super()._take(outputs)

    flags = ["--distributed-executor-backend", "uni", "--load-format", "dummy", *cases[0].get("args", [])]
    config = parse_engine_args(resolve(model, dummy=True, engine_args=flags).args).create_engine_config()
    Timed.machine = Machine({}, [], 0, VirtualClock(), NOMINAL)
    engine = EngineCore(config, Timed, log_stats=True)
    vocab = config.model_config.get_vocab_size()
    hasher = get_request_block_hasher(engine.scheduler.hash_block_size, _hash_function(config))
    captured = capture(config, engine.scheduler.kv_cache_config)
    results = []
    for core in ("stock", "kvtune"):
        build._core_in_this_process = None
        build.choose_core(SimSettings(model=model, core=core))  # type: ignore[arg-type]
        if core == "kvtune":
            from kvtune.core import plugin

            plugin._registered = False
            plugin.register()
        for case in cases:
            workload = workload_of(case["workload"], seed=0)
            blocks = case["blocks"]
            settings = SimSettings(
                model=model,
                specs={**captured, "num_blocks": blocks},
                core=core,
                digests=True,  # type: ignore[arg-type]
            )
            clock = VirtualClock()
            machine = Machine({}, [], 0, clock, NOMINAL)
            Timed.machine = machine
            _flush(engine)
            engine.scheduler = _fresh_scheduler(engine, blocks)
            engine.model_executor.requests = engine.scheduler.requests
            with policies_see(clock):
                real = RealPlayer(workload, settings, engine, clock)
                real.answers = {}
                real.play()
            simulated = Player(workload, settings, *_sim(settings))
            with policies_see(simulated._clock):
                simulated.play()
            results.append(
                {
                    "case": case["workload"],
                    "core": core,
                    "scheduler": type(engine.scheduler).__name__,
                    "pool": type(engine.scheduler.kv_cache_manager.block_pool).__name__,
                    "sim_pool": _pool_of(simulated._engine),
                    "hits": [real.journal.hits.tolist(), simulated.journal.hits.tolist()],
                    "digests": [list(real.journal.digests), list(simulated.journal.digests)],
                    "preemptions": int(real.journal.preemptions.sum()),
                }
            )
    out.write_text(json.dumps({"captured": captured, "results": results}))


def _sim(settings: Any) -> tuple[Any, Any]:
    from kvtune.sim.build import build
    from kvtune.sim.clock import VirtualClock

    clock = VirtualClock()
    return build(settings, clock), clock


def _pool_of(engine: Any) -> str:
    """The pool's class, without the simulator's own loops."""
    mro = type(engine.scheduler.kv_cache_manager.block_pool).__mro__
    return next(c.__name__ for c in mro if not c.__module__.startswith("kvtune.sim"))


def _hash_function(config: Any) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name

    return get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)


def _flush(engine: Any) -> None:
    """Let the worker forget the finished requests before the scheduler that knows of them goes."""
    while engine.scheduler.has_requests():
        engine.step_fn()
    # A worker keeps where the states of the last ones stood until its next step; ids begin anew with each case.
    getattr(engine.model_executor.driver_worker.worker.model_runner, "mamba_state_idx", {}).clear()


def _fresh_scheduler(engine: Any, blocks: int) -> Any:
    """A new scheduler (and pool) with fewer blocks than the engine allocated."""
    from dataclasses import replace

    old = engine.scheduler
    engine.vllm_config.cache_config.num_gpu_blocks = blocks
    return engine.vllm_config.scheduler_config.get_scheduler_cls()(
        vllm_config=engine.vllm_config,
        kv_cache_config=replace(old.kv_cache_config, num_blocks=blocks),
        structured_output_manager=engine.structured_output_manager,
        log_stats=True,
        block_size=old.block_size,
        hash_block_size=old.hash_block_size,
    )


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
    os._exit(0)  # torch and triton have nothing to put away, and say so at length
