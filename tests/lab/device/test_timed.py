"""The simulated device, without an engine: which requests get tokens, and when results are ready."""

from __future__ import annotations

from time import monotonic_ns
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtune.data.run.step_work import step_work
from kvtune.lab.device.cost import StepCost
from kvtune.plugin.probe.work import Work

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]  # vLLM's first import warns


def step(
    scheduled: dict[str, int],
    *,
    new: dict[str, tuple[int, int]] | None = None,
    computed: dict[str, int] | None = None,
    resumed: dict[str, int] | None = None,
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
) -> Any:
    """A SchedulerOutput. `new`: prompt tokens and computed tokens; `resumed`: tokens to compute again."""
    cached = computed or {}
    return SimpleNamespace(
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name, prompt_token_ids=[0] * prompt, prefill_token_ids=None, num_computed_tokens=done
            )
            for name, (prompt, done) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=list(cached.values()),
            num_output_tokens=[1] * len(cached),
            resumed_req_ids=set(resumed or ()),
            all_token_ids={name: [0] * tokens for name, tokens in (resumed or {}).items()},
        ),
        scheduled_spec_decode_tokens={},
        finished_req_ids=set(finished),
        preempted_req_ids=set(preempted) or None,
    )


def test_a_request_gets_its_first_token_with_the_last_chunk_of_its_prompt() -> None:
    from kvtune.lab.device.timed import Prefills

    prefills = Prefills()
    assert prefills.unfinished(step({"a": 8, "b": 8}, new={"a": (20, 0), "b": (8, 0)})) == [0]
    assert prefills.unfinished(step({"b": 1, "a": 8}, computed={"b": 8, "a": 8})) == [1]
    assert prefills.unfinished(step({"b": 1, "a": 4}, computed={"b": 9, "a": 16})) == []
    assert prefills.unfinished(step({"b": 1, "a": 1}, computed={"b": 10, "a": 20})) == []


def test_a_preempted_request_computes_its_prompt_and_its_output_again() -> None:
    from kvtune.lab.device.timed import Prefills

    prefills = Prefills()
    assert prefills.unfinished(step({"a": 8}, new={"a": (20, 0)})) == [0]
    assert prefills.unfinished(step({}, preempted=("a",))) == []
    assert prefills.unfinished(step({"a": 20}, computed={"a": 0}, resumed={"a": 25})) == [0]
    assert prefills.unfinished(step({"a": 5}, computed={"a": 20})) == []


def executor(cost: StepCost) -> Any:
    """A TimedExecutor as `_init_executor` leaves it, without vLLM's configuration."""
    from kvtune.lab.device.timed import HostClock, Prefills, TimedExecutor
    from kvtune.plugin.probe.work import WorkFollower

    made = TimedExecutor.__new__(TimedExecutor)
    made._cost, made._work, made._prefills = cost, WorkFollower(), Prefills()
    made.clock = HostClock()
    made._zeros, made._ones = np.zeros((8, 1), np.int64), np.ones(8, np.int32)
    made._sampled = None
    return made


def test_a_result_is_ready_after_the_steps_before_it_and_its_own() -> None:
    device = executor(StepCost(step_us=20_000.0, prefill_token_us=0.0, decode_us=0.0, kv_token_us=0.0))
    start = monotonic_ns()
    results = []
    for _ in range(2):
        assert device.execute_model(step({"a": 4}, new={"a": (4, 0)}), non_block=True).result() is None
        results.append(device.sample_tokens(None, non_block=True))
    device_free = device.clock.free_ns
    assert device_free - start >= 2 * 20_000_000
    for number, result in enumerate(results, start=1):
        assert [list(row) for row in result.result().sampled_token_ids] == [[0]]
        assert monotonic_ns() - start >= number * 20_000_000
    assert monotonic_ns() >= device_free


def test_a_step_without_tokens_takes_no_time_and_has_no_output() -> None:
    device = executor(StepCost(step_us=1e9, prefill_token_us=0.0, decode_us=0.0, kv_token_us=0.0))
    assert device.execute_model(step({}), non_block=True).result().req_ids == []
    assert device.clock.free_ns == 0


def test_an_unfinished_prompt_has_an_empty_row() -> None:
    device = executor(StepCost(step_us=0.0, prefill_token_us=0.0, decode_us=0.0, kv_token_us=0.0))
    device.execute_model(step({"a": 4, "b": 4}, new={"a": (9, 0), "b": (4, 0)}))
    output = device.sample_tokens(None)
    assert output.req_ids == ["a", "b"]
    assert [list(row) for row in output.sampled_token_ids] == [[], [0]]


def test_a_step_takes_what_its_cost_says_of_the_quantities_that_costs_are_fitted_to() -> None:
    cost = StepCost(
        step_us=1000.0,
        prefill_token_us=15.0,
        decode_us=8.0,
        kv_token_us=0.01,
        prefill_step_us=500.0,
        prefill_kv_us=0.001,
        between_us=77.0,
    )
    weights = [1000.0, 15.0, 8.0, 0.01, 500.0, 0.001]
    for work in (Work(64, 64, 0, 9000, 0), Work(300, 12, 290, 5000, 700), Work(512, 1, 512, 0, 0)):
        row = {
            "prefill_tokens": np.array([work.prefill, 1]),
            "scheduled_tokens": np.array([work.scheduled, 1]),
            "requests": np.array([work.requests, 1]),
            "context_tokens": np.array([work.context_tokens, 1]),
            "prefill_context_tokens": np.array([work.prefill_context_tokens, 1]),
        }
        assert cost.device_us(work) == pytest.approx(float((step_work(row) @ weights)[0]))
