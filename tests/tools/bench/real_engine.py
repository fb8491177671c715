"""vLLM's EngineCore with the real model and worker, in this process, stepped by the simulator's player on virtual time.

Real tokens, real hashes, real kernels; a step takes the time that a simulated one does, so that whoever plays the same
workload decides alike (tests/engine/lockstep.py compares them). Imports vLLM; for benchmarks.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.request import Request

from kvtune.engine.setup import Simulated
from kvtune.fake_device.cost import NOMINAL
from kvtune.sim.clock import VirtualClock
from kvtune.sim.executor import Machine, SimExecutor, VirtualResult
from kvtune.sim.player import Player
from kvtune.sim.steps import StepResult
from kvtune.workload.tokens import prompt_ids
from kvtune.workload.types import Workload


class RealExecutor(UniProcExecutor):
    """The real executor; its steps take the virtual time that a simulated one's do."""

    machine: Machine

    def _init_executor(self) -> None:
        super()._init_executor()
        SimExecutor.reset(self)  # type: ignore[arg-type]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        virtual = SimExecutor.execute_model(self, scheduler_output)  # type: ignore[arg-type]
        real = super().execute_model(scheduler_output, non_block=True)
        return VirtualResult(self.machine.clock, virtual.end_s, real.result())


class RealPlayer(Player):
    """Sends prompts of real tokens, and remembers the answers for prompts that go on from them."""

    def __init__(self, workload: Workload, settings: Simulated, engine: Any, clock: VirtualClock) -> None:
        super().__init__(workload, settings, engine, clock)
        config = engine.vllm_config
        self.answers: dict[int, list[int]] = {}
        self._vocab = config.model_config.get_vocab_size()
        self._hash = get_request_block_hasher(engine.scheduler.hash_block_size, _hash_function(config))

    def send(self, index: int, sent_s: float) -> None:
        planned = self.workload.requests[index]
        tokens = prompt_ids(planned.prompt, self.workload.seed, self._vocab, self.answers)
        self.journal.sent_s[index] = sent_s
        self.engine.add_request(
            Request(
                request_id=str(index),
                prompt_token_ids=tokens,
                sampling_params=self.factory.sampling(planned.output_tokens),
                pooling_params=None,
                arrival_time=sent_s,
                block_hasher=self._hash,
            )
        )

    def take(self, result: StepResult) -> bool:
        for batch in (result.outputs or {}).values():
            for output in batch.outputs:
                self.answers.setdefault(int(output.request_id), []).extend(output.new_token_ids)
        return super().take(result)


def real_engine(model: str, flags: list[str]) -> EngineCore:
    """An EngineCore of this model's random weights; `RealExecutor.machine` is its clock and step cost."""
    from kvtune.engine.front_end.config import engine_config, parse_engine_args
    from kvtune.engine.resolve import resolve

    given = ["--distributed-executor-backend", "uni", "--load-format", "dummy", *flags]
    config = engine_config(parse_engine_args(resolve(model, dummy=True, engine_args=given).args))
    on_clock(VirtualClock())
    return EngineCore(config, RealExecutor, log_stats=True)


def on_clock(clock: VirtualClock) -> None:
    """From here on steps move this clock."""
    RealExecutor.machine = Machine([], [], 0, clock, NOMINAL)


def _hash_function(config: Any) -> Any:
    from vllm.utils.hashing import get_hash_fn_by_name

    return get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
