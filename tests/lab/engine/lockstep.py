"""Runs workloads on the real engine (random weights, CPU) and on the simulated one, step by step in one process.

A script: `python lockstep.py JOB.json OUT.json`. JOB: model, cores (one: the engine starts with it, which layouts of
blocks need; two: it starts as stock, and each case gets a fresh scheduler of either), core_settings, args (vLLM's
flags), logprobs, loads_zeros (a tier of host memory gives back zeros), real_only (nothing is
simulated), audit (the real engine is checked after each step), cases: {workload, blocks}, or {workload (a
name), spans (of each prompt), output} for prompts made by hand. The real engine computes real tokens and hashes them
with vLLM's own hasher. Prints nothing; OUT holds, for each core and case, hits
of each request (in all, and of a tier), what a tier copied, and one digest a step from both sides, and the real
engine's answers.
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
    cores = job["cores"]
    os.environ["KVTUNE_CORE"] = "stock"  # seeded weights load only in engines that are ours
    if len(cores) == 1:
        os.environ |= {"KVTUNE_CORE": cores[0], "KVTUNE_SET": json.dumps(job.get("core_settings", {}))}
        os.environ["KVTUNE_STRICT"] = "1"
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor.uniproc_executor import UniProcExecutor
    from vllm.v1.request import Request, SamplingParams

    from bench import audit
    from kvtune.lab.device.cost import INSTANT, NOMINAL
    from kvtune.lab.engine.config import engine_config, parse_engine_args
    from kvtune.lab.setup.resolve import resolve
    from kvtune.lab.setup.setup import Setup, Simulated
    from kvtune.lab.sim import build
    from kvtune.lab.sim.clock import VirtualClock, policies_see
    from kvtune.lab.sim.executor import Machine, SimExecutor, VirtualResult
    from kvtune.lab.sim.player import Player
    from kvtune.lab.sim.steps import StepResult
    from kvtune.plugin.core import state
    from kvtune.plugin.probe.kv_specs import capture
    from kvtune.plugin.vllm.plugin_state import STATE
    from kvtune.requests.loads.spec import build as workload_of
    from kvtune.requests.loads.tokens import prompt_ids

    class Timed(UniProcExecutor):
        """The real executor; its steps take the virtual time that a simulated one's do."""

        machine: Machine

        def _init_executor(self) -> None:
            super()._init_executor()
            SimExecutor.reset(self)

        def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
            virtual = SimExecutor.execute_model(self, scheduler_output)
            real = super().execute_model(scheduler_output, non_block=True)
            return VirtualResult(self.machine.clock, virtual.end_s, real.result())

    class RealPlayer(Player):
        answers: dict[int, list[int]]
        logprobs: dict[int, list[float]]

        def send(self, index: int, sent_s: float) -> None:
            planned = self.workload.requests[index]
            tokens = prompt_ids(planned.prompt, self.workload.seed, vocab, self.answers)
            self.journal.sent_s[index] = sent_s
            sampling = SamplingParams(
                temperature=0.0,
                max_tokens=planned.output_tokens,
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if job.get("logprobs") else None,
            )
            self.engine.add_request(
                Request(
                    request_id=str(index),
                    prompt_token_ids=tokens,
                    sampling_params=sampling,
                    pooling_params=None,
                    arrival_time=sent_s,
                    block_hasher=hasher,
                )
            )

        def take(self, result: StepResult) -> bool:
            for batch in (result.outputs or {}).values():
                for output in batch.outputs:
                    index = int(output.request_id)
                    self.answers.setdefault(index, []).extend(output.new_token_ids)
                    if output.new_logprobs is not None:
                        answer = output.new_logprobs.logprobs[:, 0].tolist()
                        self.logprobs.setdefault(index, []).extend(answer)
            return super().take(result)

    if job.get("loads_zeros"):
        from kvtune.plugin.core.cpu_tier.memcpy import MemcpyWorker

        def zeros(self: Any, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
            for tensor in self._tier:
                tensor.zero_()
            return bool(load(self, job_id, src_spec, dst_spec))

        load = MemcpyWorker.submit_load
        MemcpyWorker.submit_load = zeros  # type: ignore[method-assign]
    flags = ["--distributed-executor-backend", "uni", *job.get("args", [])]
    resolved = resolve(job["model"], dummy=True, engine_args=flags)
    config = engine_config(parse_engine_args(resolved.args))
    Timed.machine = Machine([], [], 0, VirtualClock(), NOMINAL)
    engine = EngineCore(config, Timed, log_stats=True)
    vocab = config.model_config.get_vocab_size()
    hasher = None
    if config.cache_config.enable_prefix_caching or config.kv_transfer_config is not None:
        hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        hasher = get_request_block_hasher(engine.scheduler.hash_block_size, hash_function)
    captured = capture(config, engine.scheduler.kv_cache_config, engine.model_executor.get_kv_cache_specs())
    results = []
    for core in cores:
        if len(cores) > 1:
            STATE.core = ""
            STATE.loaded.clear()
            build.choose_core(Setup(model=job["model"], core=core, core_settings=chosen(job, core)))
        for case in job["cases"]:
            workload = made(case) if "spans" in case else workload_of(case["workload"], seed=0)
            blocks = case.get("blocks") or captured["num_blocks"]
            settings = Setup(
                model=job["model"],
                engine_args=job.get("args", []),
                core=core,
                core_settings=chosen(job, core),
                device=Simulated(specs={**captured, "num_blocks": blocks}, digests=True, copy=INSTANT),
            )
            clock = VirtualClock()
            Timed.machine = Machine([], [], 0, clock, NOMINAL)
            flush(engine)
            engine.scheduler = fresh_scheduler(engine, blocks)
            engine.model_executor.requests = engine.scheduler.requests
            if job.get("audit"):
                audit.watch(engine.scheduler)
            with policies_see(clock):
                real = RealPlayer(workload, settings.simulated, engine, clock)
                real.answers, real.logprobs = {}, {}
                real.play()
            clock = VirtualClock()
            simulated = Player(workload, settings.simulated, build.build(settings, clock), clock)
            if not job.get("real_only"):
                with policies_see(clock):
                    simulated.play()
            results.append(
                {
                    "workload": case["workload"],
                    "core": core,
                    "pool": pool_of(engine),
                    "sim_pool": pool_of(simulated.engine),
                    "answers": [real.answers[i] for i in range(len(workload.requests))],
                    "logprobs": [real.logprobs.get(i, []) for i in range(len(workload.requests))],
                    "hits": [real.journal.hits.tolist(), simulated.journal.hits.tolist()],
                    "tier_hits": [real.journal.tier_hits.tolist(), simulated.journal.tier_hits.tolist()],
                    "copies": [copied(real), copied(simulated)],
                    **tier_of(engine),
                    "digests": [list(real.journal.digests), list(simulated.journal.digests)],
                    "steady_steps": getattr(engine.scheduler, "steady_steps", 0),
                    "computed_twice": [twice(real), twice(simulated)],
                    "preemptions": int(real.journal.preemptions.sum()),
                    "groups": len(captured["groups"]),
                    "block": int(engine.scheduler.block_size),
                }
            )
    counts = {name: state.counters().get(name, 0) for name in ("audits", "audit_violations")}
    whole = {"state": state.state(), "blocks": captured["num_blocks"], "cases": results, **counts}
    out.write_text(json.dumps(whole))


def chosen(job: dict[str, Any], core: str) -> dict[str, Any]:
    """The settings of kvtune's core; stock has none."""
    settings: dict[str, Any] = job.get("core_settings", {})
    return settings if core == "kvtune" else {}


def twice(player: Any) -> dict[str, dict[str, int]]:
    """The tokens that were computed twice after preemptions, by request and cause."""
    player.journal.preempted.close()
    found: dict[str, dict[str, int]] = player.journal.preempted.twice
    return found


def made(case: dict[str, Any]) -> Any:
    """A workload of hand-made prompts, sent one after another."""
    from kvtune.requests.types import Request, Span, Workload

    requests = tuple(
        Request(f"{n}", tuple(Span(*span) for span in spans), case["output"])
        for n, spans in enumerate(case["spans"])
    )
    return Workload(case["workload"], case["workload"], {}, 0, requests, "", concurrency=1)


def copied(player: Any) -> dict[str, int]:
    """What a tier of host memory did in the whole case, times aside."""
    names = ("stored_bytes", "loaded_bytes", "loads", "stored_chunks", "reused_chunks", "evicted_chunks")
    return {name: sum(getattr(one, name) for one in player.journal.copies or ()) for name in names}


def tier_of(engine: Any) -> dict[str, int]:
    """The chunks of the real engine's tier of host memory, and the bytes of its tensors."""
    connector = engine.scheduler.connector
    if connector is None:
        return {}
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    tensors = get_kv_transfer_group().connector_worker.worker._tier
    chunks = connector.connector_scheduler.manager._num_chunks
    return {"tier_chunks": chunks, "tier_bytes": sum(tensor.nbytes for tensor in tensors)}


QUICK = ("kvtune.plugin.core.cache.quick", "kvtune.lab.sim.fast.runs")


def pool_of(engine: Any) -> str:
    """The pool's class, without the loops of `quick.py` and `runs.py`, which the simulator has with stock, too."""
    mro = type(engine.scheduler.kv_cache_manager.block_pool).__mro__
    return next(c.__name__ for c in mro if c.__module__ not in QUICK)


def flush(engine: Any) -> None:
    """Let the worker forget the finished requests before the scheduler that knows of them goes."""
    while engine.scheduler.has_requests():
        engine.step_fn()
    # A worker keeps where the states of the last ones stood until its next step; ids begin anew with each case.
    getattr(engine.model_executor.driver_worker.worker.model_runner, "mamba_state_idx", {}).clear()


def fresh_scheduler(engine: Any, blocks: int) -> Any:
    """A new scheduler (and pool) with fewer blocks than the engine allocated."""
    from dataclasses import replace

    old = engine.scheduler
    # A tier of host memory takes the bytes of a block from the allocation's size.
    cache = old.kv_cache_config
    tensors = [replace(t, size=t.size // cache.num_blocks * blocks) for t in cache.kv_cache_tensors]
    engine.vllm_config.cache_config.num_gpu_blocks = blocks
    return engine.vllm_config.scheduler_config.get_scheduler_cls()(
        vllm_config=engine.vllm_config,
        kv_cache_config=replace(cache, num_blocks=blocks, kv_cache_tensors=tensors),
        structured_output_manager=engine.structured_output_manager,
        log_stats=True,
        block_size=old.block_size,
        hash_block_size=old.hash_block_size,
    )


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    os._exit(0)  # torch and triton have nothing to put away, and say so at length
