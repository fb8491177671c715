"""Step costs: found again from made step logs, robust against pauses, honest about their error."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.errors import KvtuneError
from kvtune.run.types import (
    CoreInfo,
    EngineInfo,
    Header,
    HostInfo,
    Run,
    Table,
    WorkloadInfo,
    empty_table,
)
from kvtune.sim.cost import NOMINAL, StepCost, fit, read_cost


def run_with(steps: Table, *, device: str = "cpu", executor: str = "uni") -> Run:
    header = Header(
        kvtune="0",
        source="engine",
        started_at="2026-01-01T00:00:00+00:00",
        command=[],
        model="tiny-opt",
        workload=WorkloadInfo(name="w", spec="w", params={}, seed=0, hash="", requests=0),
        core=CoreInfo(name="stock"),
        engine=EngineInfo(device=device, executor=executor),
        python="3.11",
        host=HostInfo(cpu="a made CPU", cores=2),
    )
    return Run(header, {"steps": steps})


def made_steps(cost: StepCost, count: int = 400, noise: float = 0.0, seed: int = 0) -> Table:
    random = np.random.default_rng(seed)
    prefill = random.integers(0, 2000, count) * (random.random(count) < 0.4)
    decodes = random.integers(0, 64, count)
    decodes[prefill == 0] += 1
    context = random.integers(100, 50_000, count)
    time_us = np.array(
        [
            cost.seconds(int(p), int(d), int(k)) * 1e6
            for p, d, k in zip(prefill, decodes, context, strict=True)
        ]
    ) * (1 + noise * random.standard_normal(count))
    steps = {name: np.zeros(count, column.dtype) for name, column in empty_table("steps").items()}
    return {
        **steps,
        "step_us": time_us,
        "cpu_us": time_us,
        "scheduled_tokens": (prefill + decodes).astype("i4"),
        "prefill_tokens": prefill.astype("i4"),
        "context_tokens": context.astype("i8"),
    }


TRUTH = StepCost(step_us=900.0, prefill_token_us=12.0, decode_us=35.0, kv_token_us=0.02)


def weights(cost: StepCost) -> list[float]:
    return [cost.step_us, cost.prefill_token_us, cost.decode_us, cost.kv_token_us]


@given(st.tuples(*[st.floats(0.01, 1000)] * 3, st.floats(0.0, 1.0)))
@settings(max_examples=30, deadline=None)
def test_a_log_without_noise_gives_its_cost_back(parts: tuple[float, float, float, float]) -> None:
    truth = StepCost(step_us=parts[0], prefill_token_us=parts[1], decode_us=parts[2], kv_token_us=parts[3])
    found = fit(run_with(made_steps(truth)))
    np.testing.assert_allclose(weights(found), weights(truth), rtol=1e-4, atol=1e-4)
    assert found.error_share < 1e-6 and found.trusted


def test_pauses_of_the_machine_are_left_out_of_the_fit_but_not_of_its_error() -> None:
    steps = made_steps(TRUTH, noise=0.01)
    steps["cpu_us"][::23] *= 30
    found = fit(run_with(steps))
    np.testing.assert_allclose(weights(found), weights(TRUTH), rtol=0.1)
    assert found.error_share > 0.3 and not found.trusted  # who reads the prediction must know


def test_weights_are_never_negative() -> None:
    steps = made_steps(TRUTH)
    steps["cpu_us"] = np.maximum(1.0, 5000.0 - steps["prefill_tokens"])  # the more, the faster
    assert min(weights(fit(run_with(steps)))) >= 0


def test_the_clock_follows_who_computes() -> None:
    steps = made_steps(TRUTH)
    steps["step_us"] = steps["step_us"] * 2
    assert fit(run_with(steps)).clock == "cpu"
    assert fit(run_with(steps, executor="mp")).clock == "wall"
    assert fit(run_with(steps, device="cuda")).step_us == pytest.approx(1800, rel=1e-3)
    assert "a made CPU" in fit(run_with(steps)).machine


def test_a_machine_that_changes_on_the_way_is_not_trusted() -> None:
    steps = made_steps(TRUTH, noise=0.02)
    assert fit(run_with(steps)).trusted
    steps["cpu_us"][250:] *= 1.5
    assert fit(run_with(steps)).held_out_share == pytest.approx(1 / 3, abs=0.05)
    assert not fit(run_with(steps)).trusted


@pytest.mark.parametrize(("gap_s", "trusted"), [(0.0, True), (0.02, False)])
def test_time_between_steps_counts_against_a_cost(gap_s: float, trusted: bool) -> None:
    """Back-to-back steps explain a request's whole time; gaps that no step shows do not."""
    steps = made_steps(TRUTH)
    lengths = steps["step_us"] * 1e-6 + gap_s
    steps["t_s"] = np.cumsum(lengths) - lengths
    requests = {name: np.zeros(1, column.dtype) for name, column in empty_table("requests").items()}
    requests |= {"sent_s": np.array([0.0]), "finished_s": np.array([float(lengths.sum())])}
    run = run_with(steps)
    found = fit(Run(run.header, {**run.tables, "requests": requests}))
    assert found.trusted is trusted and (found.unexplained_share > 0.3) is not trusted


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(KvtuneError, match="usable steps"):
        fit(run_with(made_steps(TRUTH, count=12)))
    with pytest.raises(KvtuneError, match="0 usable steps"):
        fit(run_with(empty_table("steps")))


def test_a_cost_goes_through_json() -> None:
    found = fit(run_with(made_steps(TRUTH, noise=0.05)))
    assert read_cost(msgspec.json.encode(found).decode()) == found
    assert found.fitted and not NOMINAL.fitted and math.isfinite(found.p90_error_us)
    with pytest.raises(KvtuneError, match="not a step cost"):
        read_cost("{}")
