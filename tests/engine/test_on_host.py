"""`--on host`: vLLM's real processes in a GPU engine's shape, on a device that only takes time; one engine start."""

from __future__ import annotations

import numpy as np
import pytest

from tests.engine.real import Ran, counts_as_vllm, profiled

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STEP_US = 3000.0


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return profiled(
        tmp_path_factory.mktemp("host"),
        "tiny-gemma3", "--on", "host", "--step-us", str(STEP_US),
        "-w", "rounds:prefixes=4,prefix=2000,suffix=64,output=24,rounds=2",
        engine=("--max-num-batched-tokens", "1024"),
    )  # fmt: skip


def test_the_engine_has_a_gpus_shape(ran: Ran) -> None:
    engine = ran.run.header.engine
    assert (ran.run.header.source, engine.device, engine.executor) == ("host", "timed", "TimedExecutor")
    assert engine.async_scheduling and engine.kv_specs["config"]["scheduler_config"]["async_scheduling"]
    assert engine.block_size == 16
    assert (engine.settings["max_num_seqs"], engine.settings["max_num_batched_tokens"]) == (1024, 1024)
    assert "Async" in str(engine.settings["scheduler"])
    assert {"front_end", "engine_core"} == {p.role for p in ran.run.header.processes if p.role != "helper"}


def test_everything_that_was_asked_for_was_served_and_hit_as_on_an_engine(ran: Ran) -> None:
    counts_as_vllm(ran)
    assert ran.facts["output_tokens"] == 8 * 24
    first, second = (row["hit_tokens"] for row in ran.facts["rounds"])
    assert first == 0 and second >= 4 * 1900, "the core keeps the windows behind shared prefixes"


def test_the_core_is_in_force_as_on_a_gpu(ran: Ran) -> None:
    core = ran.run.header.core
    assert core.active and core.parts["rows"] and core.parts["steady"] and core.parts["pool"]
    assert not ran.run.header.notes and not ran.run.header.probe.disabled


def test_no_token_comes_before_the_device_had_time_for_it(ran: Ran) -> None:
    requests = ran.run.table("requests")
    took = requests["finished_s"] - requests["first_token_s"]
    assert (took >= 23 * STEP_US / 1e6 * 0.999).all()
    computed = requests["prompt_tokens"] - requests["hit_tokens"]
    steps = np.ceil(computed / 1024)
    assert (requests["first_token_s"] - requests["sent_s"] >= steps * STEP_US / 1e6).all()
