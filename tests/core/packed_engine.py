"""One real engine in this process, a layout of blocks, several workloads; the same workloads simulated after it.

A script: `python packed_engine.py JOB.json OUT.json`. JOB: model, core, core_settings, args (vLLM's flags), cases:
{workload, blocks}, or {workload (a name), spans (of each prompt), output} for prompts made by hand. OUT: for each case
answers, logprobs of their tokens, hits, preemptions and one digest a step, of the real engine and (hits, digests)
of the simulated one. Prints nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
# One thread, not bound: threads that wait for each other in every small kernel crawl on a machine that does other work.
os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def main(job: dict[str, Any], out: Path) -> None:
    os.environ |= {"KVTUNE_CORE": job["core"], "KVTUNE_SET": json.dumps(job.get("core_settings", {}))}
    os.environ["KVTUNE_STRICT"] = "1"
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.request import Request, SamplingParams

    from kvtune.core import state
    from kvtune.engine.host import parse_engine_args
    from kvtune.engine.resolve import resolve
    from kvtune.probe.kv_specs import capture
    from kvtune.sim.build import build
    from kvtune.sim.clock import VirtualClock, policies_see
    from kvtune.sim.cost import NOMINAL
    from kvtune.sim.executor import Done, Machine, SimExecutor
    from kvtune.sim.replay import Player
    from kvtune.sim.settings import SimSettings
    from kvtune.workload.spec import build as workload_of
    from kvtune.workload.tokens import prompt_ids
    from kvtune.workload.types import Request as Planned
    from kvtune.workload.types import Span, Workload

    def made(case: dict[str, Any]) -> Workload:
        requests = tuple(
            Planned(f"{n}", tuple(Span(*span) for span in spans), case["output"])
            for n, spans in enumerate(case["spans"])
        )
        return Workload(case["workload"], case["workload"], {}, 0, requests, "", concurrency=1)

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
        logprobs: dict[int, list[float]]

        def _send(self, index: int) -> None:
            planned = self._workload.requests[index]
            tokens = prompt_ids(planned.prompt, self._workload.seed, vocab, self.answers)
            self.journal.sent_s[index] = self._clock.now_s
            self._engine.add_request(
                Request(
                    request_id=str(index),
                    prompt_token_ids=tokens,
                    sampling_params=SamplingParams(
                        temperature=0.0, max_tokens=planned.output_tokens, ignore_eos=True, logprobs=0
                    ),
                    pooling_params=None,
                    arrival_time=self._clock.now_s,
                    block_hasher=hasher,
                )
            )

        def _take(self, outputs: Any) -> bool:
            for batch in (outputs or {}).values():
                for output in batch.outputs:
                    index = int(output.request_id)
                    self.answers.setdefault(index, []).extend(output.new_token_ids)
                    if output.new_logprobs is not None:
                        self.logprobs.setdefault(index, []).extend(
                            output.new_logprobs.logprobs[:, 0].tolist()
                        )
            return super()._take(outputs)

    flags = ["--distributed-executor-backend", "uni", *job.get("args", [])]
    config = parse_engine_args(
        resolve(job["model"], dummy=True, engine_args=flags).args
    ).create_engine_config()
    Timed.machine = Machine({}, [], 0, VirtualClock(), NOMINAL)
    engine = EngineCore(config, Timed, log_stats=True)
    vocab = config.model_config.get_vocab_size()
    hasher = None
    if config.cache_config.enable_prefix_caching:
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        hasher = get_request_block_hasher(engine.scheduler.hash_block_size, hash_function)
    captured = capture(config, engine.scheduler.kv_cache_config)
    cases = []
    for case in job["cases"]:
        workload = made(case) if "spans" in case else workload_of(case["workload"], seed=0)
        blocks = case.get("blocks") or engine.scheduler.kv_cache_config.num_blocks
        settings = SimSettings(
            model=job["model"],
            engine_args=job.get("args", []),
            specs={**captured, "num_blocks": blocks},
            core=job["core"],
            core_settings=job.get("core_settings", {}),
            digests=True,
        )
        clock = VirtualClock()
        Timed.machine = Machine({}, [], 0, clock, NOMINAL)
        while engine.scheduler.has_requests():  # the worker forgets the finished requests
            engine.step_fn()
        # .. but not where their states stood, when that step schedules nothing; ids begin anew with each case.
        engine.model_executor.driver_worker.worker.model_runner.mamba_state_idx.clear()
        engine.scheduler = fresh_scheduler(engine, blocks)
        engine.model_executor.requests = engine.scheduler.requests
        with policies_see(clock):
            real = RealPlayer(workload, settings, engine, clock)
            real.answers, real.logprobs = {}, {}
            real.play()
        clock = VirtualClock()
        simulated = Player(workload, settings, build(settings, clock), clock)
        with policies_see(clock):
            simulated.play()
        cases.append(
            {
                "workload": case["workload"],
                "answers": [real.answers[i] for i in range(len(workload.requests))],
                "logprobs": [real.logprobs[i] for i in range(len(workload.requests))],
                "hits": [real.journal.hits.tolist(), simulated.journal.hits.tolist()],
                "digests": [list(real.journal.digests), list(simulated.journal.digests)],
                "preemptions": int(real.journal.preemptions.sum()),
                "groups": len(captured["groups"]),
                "block": int(engine.scheduler.block_size),
            }
        )
    out.write_text(json.dumps({"state": state.state(), "blocks": captured["num_blocks"], "cases": cases}))


def fresh_scheduler(engine: Any, blocks: int) -> Any:
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
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    os._exit(0)  # torch and triton have nothing to put away, and say so at length
