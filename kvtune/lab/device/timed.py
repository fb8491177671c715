"""An executor without a model, whose results are ready after the step's time on the real clock.

Runs in EngineCore, which calls it as vLLM's UniProcExecutor on a GPU: `execute_model` and `sample_tokens` return at
once, the device computes one step after another, and the tokens come from vLLM's own AsyncOutput, whose event is done
at a set time. Every token is 0.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future
from time import monotonic_ns, sleep

import numpy as np
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.executor.uniproc_executor import AsyncOutputFuture
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput

from kvtune.data.run.limits import check_rows
from kvtune.lab.device.blocks import Stage, pool_bytes
from kvtune.lab.device.executor import ModellessExecutor
from kvtune.lab.device.kv_specs import restore, with_drafter
from kvtune.lab.device.meta_model import stages_of_model
from kvtune.lab.device.settings import read_device
from kvtune.plugin.core import state
from kvtune.plugin.core.tokens import runners
from kvtune.plugin.probe.work import WorkFollower
from kvtune.plugin.vllm.types import SchedulerOutput

TIMER_SLACK_NS = 1_000
"""How late a sleep may end (Linux's timer slack). The default of 50 µs would be added to every step."""

_SET_TIMER_SLACK = 29


class DeviceEvent:
    """In place of a CUDA event: done at time `at_ns`. Waiting for it sleeps, as waiting for vLLM's events does."""

    __slots__ = ("_at_ns",)

    def __init__(self, at_ns: int) -> None:
        self._at_ns = at_ns

    def query(self) -> bool:
        return monotonic_ns() >= self._at_ns

    def synchronize(self) -> None:
        left_ns = self._at_ns - monotonic_ns()
        if left_ns > 0:
            sleep(left_ns / 1e9)


class TimedOutput(AsyncOutput):  # type: ignore[misc]
    """Model Runner V2's output, with arrays in host memory. `counts`: tokens of each row, 1 or 0."""

    def __init__(
        self, ids: list[str], tokens: NDArray[np.int64], counts: NDArray[np.int32], at_ns: int
    ) -> None:
        rows = {name: row for row, name in enumerate(ids)}
        self.model_runner_output = ModelRunnerOutput(req_ids=ids, req_id_to_index=rows)
        self.sampled_token_ids, self.num_sampled_tokens_np = tokens, counts
        self.copy_event = DeviceEvent(at_ns)
        self.sampling_mask_tensors = self.logprobs_tensors = self.num_nans = None
        self.pending_aux_output = self._has_fault = None
        self.prompt_logprobs_dict: dict[str, object] = {}
        self.prompt_token_id_logprobs_dict: dict[str, object] = {}


class Prefills:
    """Knows which requests have their whole prompt computed after a step, and so get a token."""

    def __init__(self) -> None:
        self._prompts: dict[
            str, int
        ] = {}  # tokens to compute before the first token, of requests whose prompt is not yet computed

    def unfinished(self, output: SchedulerOutput) -> list[int]:
        """Return the rows of the step's requests that get no token yet."""
        prompts, cached = self._prompts, output.scheduled_cached_reqs
        for gone in (output.finished_req_ids, output.preempted_req_ids or ()):
            for name in gone:
                prompts.pop(name, None)
        for new in output.scheduled_new_reqs:
            prompts[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids or ())
        for name in cached.resumed_req_ids:  # model runner V1; V2 sends them as new ones
            prompts[name] = len(cached.all_token_ids[name])
        if not prompts:
            return []
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        rows: list[int] = []
        for row, (name, tokens) in enumerate(output.num_scheduled_tokens.items()):
            if name in prompts:
                if computed[name] + tokens < prompts[name]:
                    rows.append(row)
                else:
                    del prompts[name]
        return rows


class HostClock:
    """When the device will have done all its work: in nanoseconds, and in seconds for a host-memory tier."""

    __slots__ = ("free_ns",)

    def __init__(self) -> None:
        self.free_ns = 0

    @property
    def device_free_s(self) -> float:
        return self.free_ns / 1e9

    @device_free_s.setter
    def device_free_s(self, at_s: float) -> None:
        self.free_ns = round(at_s * 1e9)


class TimedExecutor(ModellessExecutor):
    """An executor that sleeps instead of using a device."""

    clock: HostClock

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        device = read_device()
        self.pool_bytes = pool_bytes(self.vllm_config)
        captured = device.specs
        self.stages, self.layouts = (
            ([Stage(with_drafter(restore(captured), self.vllm_config))], [])
            if captured
            else stages_of_model(self.vllm_config)
        )
        self._cost = device.cost
        self._work, self._prefills = WorkFollower(), Prefills()
        self.clock, self.copy = HostClock(), device.copy
        most = int(self.scheduler_config.max_num_seqs)
        check_rows(most)
        self._zeros, self._ones = np.zeros((most, 1), np.int64), np.ones(most, np.int32)
        self._sampled: TimedOutput | None = None
        if current_platform.is_cpu() and state.state()["parts"].get("rows"):
            runners.install_gpu_outputs()
        ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, TIMER_SLACK_NS, 0, 0, 0)

    def execute_model(
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> Future[ModelRunnerOutput | None] | ModelRunnerOutput | None:
        """Give the step to the device. `sample_tokens` returns its tokens; a step without work has none."""
        tier = self.tier
        if tier is not None:
            tier.before(scheduler_output, monotonic_ns() / 1e9)
        without_token = self._prefills.unfinished(scheduler_output)
        ids = list(scheduler_output.num_scheduled_tokens)
        if not ids:
            empty = self.without_work(scheduler_output, monotonic_ns() / 1e9)
            return _done(empty) if non_block else empty
        clock, step_us = self.clock, self._cost.device_us(self._work.follow(scheduler_output))
        clock.free_ns = max(monotonic_ns(), clock.free_ns) + int(1e3 * step_us)
        counts = self._ones[: len(ids)]
        if without_token:
            counts = counts.copy()
            counts[without_token] = 0
        self._sampled = TimedOutput(ids, self._zeros[: len(ids)], counts, clock.free_ns)
        if tier is not None:
            # A GPU's worker looks for finished copies when it starts the step.
            copied = tier.after(scheduler_output, monotonic_ns() / 1e9)
            self._sampled.model_runner_output.kv_connector_output = copied
        return _done(None) if non_block else None

    def sample_tokens(
        self, grammar_output: object, non_block: bool = False
    ) -> AsyncOutputFuture | ModelRunnerOutput:
        sampled = self._sampled
        assert sampled is not None
        self._sampled = None
        return AsyncOutputFuture(sampled, True) if non_block else sampled.get_output()


def _done(value: ModelRunnerOutput | None) -> Future[ModelRunnerOutput | None]:
    future: Future[ModelRunnerOutput | None] = Future()
    future.set_result(value)
    return future
