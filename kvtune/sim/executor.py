"""vLLM's executor that computes nothing: every request that has all its tokens in gets a token, after a virtual time.

Runs in the simulator's process under vLLM's own EngineCore. Its futures move the clock when they are waited for, so the
batch queue of asynchronous scheduling overlaps as it does on a device that runs one step after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from kvtune.sim.clock import VirtualClock
from kvtune.sim.cost import StepCost

_TOKEN = [0]
"""What every request generates. Shared by all rows: nothing downstream of a one-token row changes it."""


@dataclass(slots=True)
class Step:
    """One step as it was sent to the device; `decodes` counts requests, `context_tokens` the KV they attend to."""

    start_s: float
    end_s: float
    prefill_tokens: int
    requests: int
    decodes: int
    context_tokens: int
    prefill_context_tokens: int
    output: Any  # vLLM's SchedulerOutput, or what a digest reads of it


@dataclass(frozen=True, slots=True)
class Machine:
    """What `SimExecutor` needs, handed over through a class attribute because vLLM constructs executors itself."""

    specs: dict[str, Any]
    layouts: list[str]
    pool_bytes: int
    clock: VirtualClock
    cost: StepCost


class VirtualResult:
    """What EngineCore waits for: a result that is there at a virtual time."""

    __slots__ = ("_clock", "_end_s", "_value")

    def __init__(self, clock: VirtualClock, end_s: float, value: Any) -> None:
        self._clock, self._end_s, self._value = clock, end_s, value

    def done(self) -> bool:
        return self._clock.now_s >= self._end_s

    def result(self, timeout: float | None = None) -> Any:
        self._clock.advance_to(self._end_s)
        return self._value


class SimExecutor(Executor):  # type: ignore[misc]
    machine: Machine  # set on the class before EngineCore is built

    def _init_executor(self) -> None:
        self.no_steps()

    def no_steps(self) -> None:
        """As before the first step. Tests give a real executor these, too."""
        self.requests: dict[str, Any] = {}  # the scheduler's, set once it exists
        self.on_step: Callable[[Step], None] | None = None
        self.decode_tokens = 1  # tokens that a decoding request makes in this step: more in a jump
        self.cost_of_jump: Callable[[], float] | None = None
        # Requests that decode in this step without being in what is scheduled, and their KV tokens.
        self.aside = (0, 0)
        self.aside_digest: Any = None
        self._pending: Any = None

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        return [dict(self.machine.specs)]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [self.machine.layouts]

    def determine_available_memory(self) -> list[int]:
        return [self.machine.pool_bytes]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        pass

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: Any = (),
        kwargs: Any = None,
        non_block: bool = False,
    ) -> list[Any]:
        if method == "update_max_model_len":
            return [None]
        raise NotImplementedError(f"a simulated worker has no {method}")

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """The step's output as a future; the synchronous step of EngineCore takes it as it is."""
        scheduled = scheduler_output.num_scheduled_tokens
        aside, context = self.aside
        if not scheduled and not aside:
            return VirtualResult(self.machine.clock, self.machine.clock.now_s, EMPTY_MODEL_RUNNER_OUTPUT)
        made = _TOKEN if self.decode_tokens == 1 else None
        rows: list[list[int]] = []
        requests = self.requests
        prefill = prefill_context = 0
        prefill_kv = 0.0
        decodes = aside
        for request_id, tokens in scheduled.items():
            request = requests[request_id]
            # The scheduler has already advanced the request by this step.
            computed = request.num_computed_tokens
            before = computed - tokens
            context += before
            if request.is_prefill_chunk:
                rows.append([])
            else:
                rows.append(made if made is not None else [0] * self.decode_tokens)
                if before >= request.num_prompt_tokens:
                    decodes += 1
                    continue
            prefill += tokens
            prefill_context += before
            prefill_kv += tokens * (before + tokens / 2)
        clock = self.machine.clock
        start = max(clock.now_s, clock.device_free_s)
        jump = self.cost_of_jump
        cost = (
            jump()
            if jump is not None
            else self.machine.cost.seconds(prefill, decodes, context - prefill_context, prefill_kv)
        )
        end = clock.run(cost)
        if self.on_step is not None:
            whole = scheduler_output if self.aside_digest is None else self.aside_digest
            self.on_step(
                Step(start, end, prefill, len(scheduled) + aside, decodes, context, prefill_context, whole)
            )
            self.aside_digest = None
        ids = list(scheduled)
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)}, sampled_token_ids=rows
        )
        self._pending = VirtualResult(clock, end, output)
        return self._pending

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._pending
