"""`--on host`: vLLM's real processes in a GPU engine's shape, on a simulated device; one engine start."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtune.data.run.types import Run
from kvtune.lab.device.cost import StepCost
from kvtune.lab.device.fit import fit
from kvtune.lab.device.settings import Timed
from kvtune.lab.engine.profile import EngineBench
from kvtune.lab.setup.setup import Load, Setup
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.requests.loads.spec import build

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

COST = StepCost(
    step_us=20_000.0, prefill_token_us=75.0, decode_us=1500.0, kv_token_us=0.5, prefill_step_us=5000.0
)
"""Slow enough to hide a host that is busy with other work."""
PREFIXES, ROUNDS, PROMPT, OUTPUT = 6, 3, 1000 + 64, 40


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Run:
    job = Setup(
        model="tiny-gemma3",
        load=Load.of(
            build(
                f"rounds:prefixes={PREFIXES},prefix=1000,suffix=64,output={OUTPUT},rounds={ROUNDS},concurrency=6",
                seed=0,
            )
        ),
        core_settings={"collect_at_wait": True},
        engine_args=["--max-num-batched-tokens", "512"],
        device=Timed(cost=COST, name="made"),
        core="kvtune",
    )
    done = EngineBench(tmp_path_factory.mktemp("host")).run(job)
    assert done.error is None and Path(done.path).exists()
    return done.run


def test_the_engine_has_a_gpus_shape(ran: Run) -> None:
    engine = ran.header.engine
    assert (ran.header.source, engine.device, engine.executor) == ("host", "timed", "TimedExecutor")
    assert engine.async_scheduling and engine.kv_specs["config"]["scheduler_config"]["async_scheduling"]
    assert engine.block_size == 16
    assert (engine.settings["max_num_seqs"], engine.settings["max_num_batched_tokens"]) == (512, 512)
    assert "Async" in str(engine.settings["scheduler"])
    assert {"front_end", "engine_core"} == {p.role for p in ran.header.processes if p.role != "helper"}


def test_everything_that_was_asked_for_was_served_and_hit_as_on_an_engine(ran: Run) -> None:
    requests, counters = ran.table("requests"), ran.header.engine_counters
    assert requests["output_tokens"].tolist() == [OUTPUT] * PREFIXES * ROUNDS
    assert counters["finished"] == PREFIXES * ROUNDS
    assert counters["generation_tokens"] == PREFIXES * ROUNDS * OUTPUT
    first, *later = (
        int(requests["hit_tokens"][requests["round"] == n].sum())
        for n in sorted({*requests["round"].tolist()})
    )
    assert first == 0
    assert all(hits >= 0.9 * PREFIXES * 1000 for hits in later), (
        "the core keeps windows behind shared prefixes"
    )


def test_the_core_is_in_force_as_on_a_gpu(ran: Run) -> None:
    core = ran.header.core
    assert core.active and all(
        core.parts[name] for name in ("rows", "steady", "pool", "collect_at_wait", "front_end")
    )
    assert core.counters["column_steps"] > OUTPUT
    assert not ran.header.notes and not ran.header.probe.disabled


def test_every_batch_has_a_record_also_those_that_only_drain(ran: Run) -> None:
    steps, requests = ran.table("steps"), ran.table("requests")
    computed = int((requests["prompt_tokens"] - requests["hit_tokens"]).sum())
    assert int(steps["prefill_tokens"].sum()) == computed
    # Each output token but a request's last is fed back as input.
    assert int(steps["scheduled_tokens"].sum()) == computed + PREFIXES * ROUNDS * (OUTPUT - 1)
    assert np.isfinite(steps["wait_us"]).all() and (steps["step_us"] >= steps["wait_us"]).all()


def test_no_token_comes_before_the_device_had_time_for_it(ran: Run) -> None:
    requests = ran.table("requests")
    # From the send, not from the first token: on a busy machine a caller may receive that one late, the last in time.
    first_s = requests["first_token_s"] - requests["sent_s"]
    last_s = requests["finished_s"] - requests["sent_s"]
    step_us = COST.step_us + COST.decode_us
    assert (first_s >= COST.step_us / 1e6).all()
    assert (last_s >= (COST.step_us + (OUTPUT - 1) * step_us) / 1e6).all()


def test_the_fit_gives_back_the_costs_that_the_device_was_given(ran: Run) -> None:
    fitted = fit(ran)
    assert fitted.clock == "device" and fitted.between_us == 0.0
    for prefill, decodes, context in ((0, 6, 6000), (0, 3, 3200), (512, 0, 0), (300, 5, 5000)):
        given, found = (cost.seconds(prefill, decodes, context) for cost in (COST, fitted))
        assert found == pytest.approx(given, rel=0.05), (prefill, decodes, context)


def test_what_the_host_does_is_hidden_behind_such_a_device(ran: Run) -> None:
    overlap = RunAnalysis(ran).overlap
    assert overlap is not None and overlap.device_ms is not None
    assert overlap.waited_share > 0.5 and not overlap.host_limits
