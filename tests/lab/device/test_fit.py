"""Step costs: recovered from synthetic step logs, in spite of pauses, with the right error."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvtune.base.errors import KvtuneError
from kvtune.data.run.types import (
    CoreInfo,
    EngineInfo,
    Header,
    HostInfo,
    Run,
    Table,
    WorkloadInfo,
    empty_table,
)
from kvtune.lab.device.cost import NOMINAL, StepCost, read_cost
from kvtune.lab.device.fit import fit


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
    cached = random.integers(0, 4_000, count) * (prefill > 0)
    time_us = np.array(
        [
            cost.seconds(int(p), int(d), int(k), p * (o + p / 2)) * 1e6
            for p, d, k, o in zip(prefill, decodes, context, cached, strict=True)
        ]
    ) * (1 + noise * random.standard_normal(count))
    steps = {name: np.zeros(count, column.dtype) for name, column in empty_table("steps").items()}
    return {
        **steps,
        "step_us": time_us,
        "cpu_us": time_us,
        "scheduled_tokens": (prefill + decodes).astype("i4"),
        "requests": (decodes + (prefill > 0)).astype("i4"),
        "prefill_tokens": prefill.astype("i4"),
        "context_tokens": (context + cached).astype("i8"),
        "prefill_context_tokens": cached.astype("i8"),
    }


TRUTH = StepCost(
    step_us=900.0,
    prefill_token_us=12.0,
    decode_us=35.0,
    kv_token_us=0.02,
    prefill_step_us=400.0,
    prefill_kv_us=0.002,
)


def weights(cost: StepCost) -> list[float]:
    return [
        cost.step_us,
        cost.prefill_token_us,
        cost.decode_us,
        cost.kv_token_us,
        cost.prefill_step_us,
        cost.prefill_kv_us,
    ]


@pytest.mark.full
@given(st.tuples(*[st.floats(0.01, 1000)] * 4, *[st.floats(0.0, 1.0)] * 2))
@settings(max_examples=30, deadline=None)
@example((1.0, 129.0, 0.5, 65.0, 0.0, 0.0))
def test_a_log_without_noise_is_fitted_exactly(parts: tuple[float, ...]) -> None:
    truth = StepCost(
        step_us=parts[0],
        prefill_token_us=parts[1],
        decode_us=parts[2],
        prefill_step_us=parts[3],
        kv_token_us=parts[4],
        prefill_kv_us=parts[5],
    )
    log = made_steps(truth)
    fitted = fit(run_with(log))
    other = made_steps(truth, seed=1)
    for p, d, k, expected, us in zip(
        other["prefill_tokens"].tolist(),
        (other["scheduled_tokens"] - other["prefill_tokens"]).tolist(),
        other["context_tokens"].tolist(),
        other["prefill_context_tokens"].tolist(),
        other["cpu_us"].tolist(),
        strict=True,
    ):
        assert fitted.seconds(p, d, k - expected, p * (expected + p / 2)) * 1e6 == pytest.approx(us, rel=1e-3)
    assert fitted.error_share < 1e-6 and fitted.trusted


def test_pauses_are_left_out_of_the_fit_but_count_in_its_error() -> None:
    steps = made_steps(TRUTH, noise=0.01)
    steps["cpu_us"][::23] *= 30
    fitted = fit(run_with(steps))
    np.testing.assert_allclose(weights(fitted), weights(TRUTH), rtol=0.25)
    assert fitted.error_share > 0.3 and not fitted.trusted  # a reader of the prediction must know


def test_weights_are_never_negative() -> None:
    steps = made_steps(TRUTH)
    steps["cpu_us"] = np.maximum(1.0, 5000.0 - steps["prefill_tokens"])  # the more, the faster
    assert min(weights(fit(run_with(steps)))) >= 0


def test_long_prefills_are_not_taken_for_pauses() -> None:
    """One step in twenty prefills, and takes thirty times as long as the others: its cost is in the fit."""
    steps = made_steps(
        StepCost(step_us=900.0, prefill_token_us=40.0, decode_us=1.0, kv_token_us=0.0), noise=0.05
    )
    few = np.flatnonzero(steps["prefill_tokens"])[::8]
    keep = np.sort(np.concatenate([np.flatnonzero(steps["prefill_tokens"] == 0), few]))
    steps = {name: column[keep] for name, column in steps.items()}
    assert fit(run_with(steps)).prefill_token_us == pytest.approx(40.0, rel=0.1)


def test_the_uni_executor_on_a_cpu_is_fitted_to_the_clock_that_explains_more() -> None:
    steps = made_steps(TRUTH)
    lengths = steps["step_us"] * 1e-6
    steps["t_s"] = np.cumsum(lengths) - lengths
    requests = {name: np.zeros(1, column.dtype) for name, column in empty_table("requests").items()}
    requests |= {"sent_s": np.array([0.0]), "finished_s": np.array([float(lengths.sum())])}

    def fitted_on(steps: Table, executor: str = "uni", device: str = "cpu") -> StepCost:
        run = run_with(steps, executor=executor, device=device)
        return fit(Run(run.header, {**run.tables, "requests": requests}))

    half = {**steps, "cpu_us": steps["step_us"] / 2}  # the engine's thread waits half of the time
    assert fitted_on(half).clock == "wall"
    random = np.random.default_rng(1)
    busy = {**steps, "step_us": steps["step_us"] * random.lognormal(0, 1.5, len(lengths))}
    assert fitted_on(busy).clock == "cpu"
    assert fitted_on(busy, executor="mp").clock == "wall"
    assert fitted_on(busy, device="cuda").clock == "wall"
    assert "a made CPU" in fitted_on(half).machine


def test_a_cost_is_not_trusted_where_the_machine_changes_during_the_run() -> None:
    steps = made_steps(TRUTH, noise=0.02)
    assert fit(run_with(steps)).trusted
    steps["cpu_us"][250:] *= 1.5
    assert fit(run_with(steps)).held_out_share == pytest.approx(1 / 3, abs=0.05)
    assert not fit(run_with(steps)).trusted


def in_a_row(steps: Table, gaps_s: NDArray[Any], delays_s: tuple[float, float]) -> dict[str, Table]:
    """Tables of a client that sends a request each 10 steps, when it has the last one's answer."""
    count, lengths = len(steps["step_us"]), steps["step_us"] * 1e-6
    first = np.arange(count) % 10 == 0
    gaps_s = np.where(first, sum(delays_s) + 0.0005, gaps_s)  # the client thinks for half a millisecond
    begins = np.cumsum(gaps_s) + np.cumsum(lengths) - lengths
    ends = begins + lengths
    steps = {**steps, "t_s": begins, "running": (np.arange(count) % 10 != 9).astype("i4")}
    n = int(first.sum())
    requests = {name: np.zeros(n, column.dtype) for name, column in empty_table("requests").items()}
    requests |= {"sent_s": begins[first] - delays_s[0], "finished_s": ends[9::10] + delays_s[1]}
    tokens = {
        "request": np.arange(count, dtype="i4") // 10,
        "t_s": ends + delays_s[1],
        "count": np.ones(count, "i4"),
    }
    return {"steps": steps, "requests": requests, "tokens": tokens}


def test_transport_delays_and_the_gap_between_steps_are_recovered() -> None:
    gaps_s = np.full(400, 0.0003)
    gaps_s[5::100] = 3.0  # pauses of the machine
    made = in_a_row(made_steps(TRUTH), gaps_s, (0.0013, 0.0021))
    run = run_with(made["steps"])
    fitted = fit(Run(run.header, {**run.tables, **made}))
    np.testing.assert_allclose(
        [fitted.between_us, fitted.enter_us, fitted.leave_us], [300.0, 1300.0, 2100.0], rtol=1e-6
    )
    assert not fitted.trusted  # four pauses of three seconds
    calm = in_a_row(made_steps(TRUTH), np.full(400, 0.0003), (0.0013, 0.0021))
    fitted = fit(Run(run.header, {**run.tables, **calm}))
    assert fitted.trusted and fitted.unexplained_share < 0.01
    calm["steps"]["running"][:] = 1  # never idle: request delay is hidden
    fitted = fit(Run(run.header, {**run.tables, **calm}))
    assert fitted.enter_us == fitted.leave_us == pytest.approx(2100.0)
    nothing = TRUTH.seconds(0, 1, 10) + 300e-6
    assert msgspec.structs.replace(TRUTH, between_us=300.0).seconds(0, 1, 10) == pytest.approx(nothing)


@pytest.mark.parametrize(("gap_s", "trusted"), [(0.0, True), (0.02, False)])
def test_gaps_that_no_median_shows_count_against_a_cost(gap_s: float, trusted: bool) -> None:
    """Back-to-back steps explain a request's whole time; long gaps after two steps in five do not."""
    gaps_s = np.where(np.arange(400) % 5 < 2, 3 * gap_s, 0.0)
    made = in_a_row(made_steps(TRUTH), gaps_s, (0.0, 0.0))
    run = run_with(made["steps"])
    fitted = fit(Run(run.header, {**run.tables, **made}))
    assert fitted.trusted is trusted and (fitted.unexplained_share > 0.3) is not trusted


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(KvtuneError, match="usable steps"):
        fit(run_with(made_steps(TRUTH, count=12)))
    with pytest.raises(KvtuneError, match="0 usable steps"):
        fit(run_with(empty_table("steps")))


def test_a_cost_survives_json() -> None:
    fitted = fit(run_with(made_steps(TRUTH, noise=0.05)))
    assert read_cost(msgspec.json.encode(fitted).decode()) == fitted
    assert fitted.fitted and not NOMINAL.fitted and math.isfinite(fitted.error_share)
    with pytest.raises(KvtuneError, match="not a step cost"):
        read_cost("{}")


def test_batches_for_which_the_host_came_late_are_no_measure_of_the_device() -> None:
    """Their device time ends when EngineCore looked: --on host --like would add the host twice."""
    steps = made_steps(TRUTH)
    late = np.arange(len(steps["step_us"])) % 2 == 0
    steps["device_us"] = np.where(late, 3 * steps["step_us"], steps["step_us"])
    steps["step_us"] = steps["device_us"].copy()
    steps["wait_us"] = np.where(late, 0.0, 0.9 * steps["step_us"])
    run = run_with(steps, device="cuda")
    engine = msgspec.structs.replace(run.header.engine, async_scheduling=True)
    fitted = fit(Run(msgspec.structs.replace(run.header, engine=engine), run.tables))
    np.testing.assert_allclose(weights(fitted), weights(TRUTH), rtol=0.05)
    assert fitted.clock == "device"
