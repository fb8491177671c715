"""vLLM's EngineCore decoding a fixed batch, with a worker that answers at once: the host's CPU of a step, and no more.

As behind the multiprocess executor, a step pickles its messages to the worker and unpickles the answer; what is
left out is waiting for the model, and the thread that sends outputs to the front end.
"""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from time import thread_time_ns
from typing import Any

from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim import build as building
from kvtune.lab.sim import executor
from kvtune.lab.sim.clock import VirtualClock
from kvtune.lab.sim.requests import Factory
from kvtune.requests.loads.spec import build as workload_of

MODEL = "tiny-opt"
PROMPT = 48
CONTEXT = 1800


class Answering(executor.SimExecutor):
    """A step whose rows were fixed is answered by unpickling them; others as the simulator does it."""

    wire = b""

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        if not self.wire:
            return super().execute_model(scheduler_output, non_block)
        pickle.dumps(("execute_model", (scheduler_output,), {}, 0), pickle.HIGHEST_PROTOCOL)
        done: Future[Any] = Future()
        done.set_result(None)  # vLLM's workers keep the logits and answer when sampling is asked for
        return done

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        if not self.wire:
            return super().sample_tokens(grammar_output, non_block)
        pickle.dumps(("sample_tokens", (grammar_output,), {}, 0), pickle.HIGHEST_PROTOCOL)
        return pickle.loads(self.wire)


class Decoding:
    """One EngineCore with `batch` requests that decode; `fresh()` begins anew when they have grown long."""

    def __init__(self, batch: int, core: str) -> None:
        self.batch = batch
        self.spec = workload_of(f"decode:requests={batch},prompt={PROMPT},output={CONTEXT}")
        blocks = batch * (CONTEXT // 128 + 2) + 64
        arguments = ["--num-gpu-blocks-override", str(blocks), "--max-num-seqs", str(batch)]
        arguments += ["--max-num-batched-tokens", "65536"]
        settings = Setup(model=MODEL, engine_args=arguments, core=core, device=Simulated(shortcuts=False))
        executor.SimExecutor = Answering  # type: ignore[misc]
        self.engine = building.build(settings, VirtualClock())
        self._as_a_process(core)
        self.scheduler = self.engine.scheduler

    def _as_a_process(self, core: str) -> None:
        """EngineCore in its own process has queues and a loop; the loop's step is what is measured."""
        import queue

        from vllm.v1.engine.core import EngineCoreProc

        self.engine.__class__ = EngineCoreProc
        self.engine.output_queue = queue.Queue()
        if core == "kvtune":
            from kvtune.plugin.vllm.plugin_state import STATE

            STATE.outputs_are_encoded = True

    def fresh(self, step: Callable[[Any], bool]) -> None:
        """New requests, their prompts computed, rows fixed, the heap frozen as EngineCore freezes it."""
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.request import RequestStatus

        worker = self.engine.model_executor
        worker.wire = b""
        live = list(self.scheduler.requests)
        self.scheduler.finish_requests(live, RequestStatus.FINISHED_ABORTED)
        factory = Factory(self.spec.requests, self.scheduler.hash_block_size, True)
        for index in range(self.batch):
            self.scheduler.add_request(factory.make(index, 0.0))
        for _ in range(4):
            step(self.engine)
        running = [r.request_id for r in self.scheduler.running]
        assert len(running) == self.batch
        output = ModelRunnerOutput(
            req_ids=running,
            req_id_to_index={name: i for i, name in enumerate(running)},
            sampled_token_ids=[[7] for _ in running],
        )
        worker.wire = pickle.dumps(output, pickle.HIGHEST_PROTOCOL)
        step(self.engine)
        gc.collect()
        gc.freeze()

    def stretch(self, step: Callable[[Any], bool], steps: int) -> int:
        """CPU nanoseconds of this thread in `steps` steps."""
        engine, outputs = self.engine, self.engine.output_queue.queue
        outputs.clear()
        start = thread_time_ns()
        for _ in range(steps):
            step(engine)
            outputs.clear()  # sent and gone, as by the output thread
        return thread_time_ns() - start


def in_a_fork(work: Callable[[], Any]) -> Any:
    """What `work` returns, computed in a fork of this process (one choice of core and instrument a process)."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        try:
            with os.fdopen(writer, "wb") as out:
                pickle.dump(work(), out)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as source:
        raw = source.read()
    os.waitpid(child, 0)
    if not raw:
        raise SystemExit("a measurement failed: its traceback stands above")
    return pickle.loads(raw)


def machine() -> str:
    """Processor and cores, for a table's heading."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "processor unknown",
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores"
