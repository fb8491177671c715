"""vLLM's executor without a model: requests past their prompt get one token per step, at a virtual time.

Runs in the simulator's process under vLLM's own EngineCore. The clock advances when EngineCore waits for a result, so
with asynchronous scheduling steps queue up as on a device that runs one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from vllm.v1.outputs import ModelRunnerOutput

from kvtune.lab.device.blocks import Stage
from kvtune.lab.device.cost import CopyTime, StepCost
from kvtune.lab.device.executor import ModellessExecutor
from kvtune.lab.sim.clock import VirtualClock
from kvtune.lab.sim.steps import ExecutedStep, hidden_of
from kvtune.plugin.vllm.types import Request, SchedulerOutput

_TOKEN = [0]
"""The row of tokens that each request gets in a step. Shared: vLLM does not change a row of one token."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The inputs of a `SimExecutor`; a class attribute holds them, because vLLM constructs executors itself."""

    stages: Sequence[Stage]
    layouts: list[str]
    pool_bytes: int
    clock: VirtualClock
    cost: StepCost
    copy: CopyTime = field(default_factory=CopyTime)


class VirtualResult:
    """A future that is done at virtual time `end_s`; `result()` advances the clock to that time."""

    __slots__ = ("_clock", "end_s", "value")

    def __init__(self, clock: VirtualClock, end_s: float, value: ModelRunnerOutput) -> None:
        self._clock, self.end_s, self.value = clock, end_s, value

    def done(self) -> bool:
        return self._clock.now_s >= self.end_s

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self._clock.advance_to(self.end_s)
        return self.value


class SimExecutor(ModellessExecutor):
    machine: Machine  # set on the class before EngineCore is built

    def _init_executor(self) -> None:
        machine = self.machine
        self.stages, self.layouts, self.pool_bytes = machine.stages, machine.layouts, machine.pool_bytes
        self.clock, self.copy = machine.clock, machine.copy
        self.reset()
        self.runs_ahead = self.vllm_config.max_concurrent_batches > 1

    def reset(self) -> None:
        """Set the state before the first step. Tests call this on real executors, too."""
        self.requests: dict[str, Request] = {}  # the scheduler's, set once it exists
        self.on_step: Callable[[ExecutedStep], None] | None = None
        self.tier = None
        self._pending: VirtualResult | None = None

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> VirtualResult:
        """Return the step's output as a future, also if `non_block` is False."""
        scheduled = scheduler_output.num_scheduled_tokens
        clock, tier = self.machine.clock, self.tier
        if tier is not None:
            tier.before(scheduler_output, clock.now_s)
        if not scheduler_output.total_num_scheduled_tokens:
            output = ModellessExecutor.without_work(self, scheduler_output, clock.now_s)
            return VirtualResult(clock, clock.now_s, output)
        rows: list[list[int]] = []
        requests = self.requests
        hidden = hidden_of(scheduler_output)
        decodes, context = (0, 0) if hidden is None else (len(hidden.names), hidden.context)
        prefill = prefill_context = 0
        prefill_kv = 0.0
        for request_id, tokens in scheduled.items():
            request = requests[request_id]
            # The scheduler has already advanced the request by this step.
            before = request.num_computed_tokens - tokens
            context += before
            if request.is_prefill_chunk:
                rows.append([])
            else:
                rows.append(_TOKEN)
                # After a preemption, the tokens of its answer are computed again, too, as a prompt's are.
                if before >= max(request.num_prompt_tokens, request.num_tokens - 1):
                    decodes += 1
                    continue
            prefill += tokens
            prefill_context += before
            prefill_kv += tokens * (before + tokens / 2)
        start = max(clock.now_s, clock.device_free_s)
        end = clock.run(self.machine.cost.seconds(prefill, decodes, context - prefill_context, prefill_kv))
        if self.on_step is not None:
            self.on_step(
                ExecutedStep(
                    start_s=start,
                    end_s=end,
                    prefill_tokens=prefill,
                    requests=len(scheduled) + (0 if hidden is None else len(hidden.names)),
                    decodes=decodes,
                    context_tokens=context,
                    prefill_context_tokens=prefill_context,
                    scheduled=scheduler_output,
                )
            )
        ids = list(scheduled)
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: i for i, name in enumerate(ids)}, sampled_token_ids=rows
        )
        if tier is not None:
            # A synchronous worker looks for finished copies after the model has run, an asynchronous one before that.
            at_s = clock.now_s if self.runs_ahead else end
            output.kv_connector_output = tier.after(scheduler_output, at_s)
        self._pending = VirtualResult(clock, end, output)
        return self._pending

    def take_draft_token_ids(self) -> None:
        """Return None, as no drafter runs: the scheduler works as if all draft tokens were rejected."""

    def sample_tokens(self, grammar_output: object, non_block: bool = False) -> VirtualResult | None:
        return self._pending
