"""What a device hides of the host's work, and the ceiling that the host sets: runs made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replace_struct

from kvtune.data.run.types import EngineInfo, ProcessInfo, Run
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from kvtune.reading.report.sections import gc, host
from kvtune.requests.types import Span
from tests.reading.analysis.made import served, table, workload_of
from tests.reading.report.drawn import summary_text

STEPS = 1000


def ran(*, device_us: float, host_us: float, source: str = "engine", **gc: Any) -> Run:
    """An engine that schedules ahead: 10 requests decode in each of 1,000 steps, half of the host's work schedules."""
    step_us = max(device_us, host_us)
    starts = np.arange(STEPS) * step_us / 1e6
    n = STEPS * 10
    steps = table(
        "steps",
        process=[1] * STEPS,
        t_s=starts,
        step_us=[step_us] * STEPS,
        schedule_us=[host_us / 2] * STEPS,
        update_us=[host_us / 4] * STEPS,
        wait_us=[step_us - host_us] * STEPS,
        device_us=[step_us] * STEPS,
        cpu_us=[host_us] * STEPS,
        scheduled_tokens=[10] * STEPS,
        requests=[10] * STEPS,
    )
    tokens = table(
        "tokens", request=[0] * STEPS, t_s=starts + 1e-6, count=[10] * STEPS, made_s=[np.nan] * STEPS
    )
    end = STEPS * step_us / 1e6
    memory = table(
        "memory",
        process=[0, 0, 1, 1],
        t_s=[0.0, end, 0.0, end],
        cpu_s=[0.0, n * 12e-6, 0.0, n * 5e-6],
        rss_bytes=[1] * 4,
    )
    tables = {"steps": steps, "tokens": tokens, "memory": memory}
    if gc:
        tables["gc"] = table("gc", **gc)
    engine = EngineInfo(vllm="0.32.0", device="cuda", async_scheduling=True, block_size=16, num_blocks=100)
    prompt = workload_of([[Span(0, 0, 40)]], output=n)
    return served(prompt, [0], tables=tables, engine=engine, wall_s=end, source=source)


def test_work_behind_a_device_that_takes_longer_is_hidden() -> None:
    analysis = RunAnalysis(ran(device_us=8100.0, host_us=2300.0))
    overlap = analysis.overlap
    assert overlap is not None and overlap.device_ms == pytest.approx(8.1)
    assert (overlap.host_ms, overlap.waited_share, overlap.exposed_share) == (pytest.approx(2.3), 1.0, 0.0)
    assert analysis.step_time.exposed_host_s == 0.0
    verdict = analysis.verdict
    assert verdict.kind == "model"
    assert "needs 8.1 ms a step, the host 2.3 ms of it, hidden" in verdict.limit
    section = host.section(analysis)
    assert section is not None and "needs 8.1 ms a step, the host 2.3 ms of it, hidden" in section.lead


def test_a_host_that_takes_longer_than_the_device_is_what_limits() -> None:
    analysis = RunAnalysis(ran(device_us=1000.0, host_us=4000.0))
    overlap = analysis.overlap
    assert overlap is not None and overlap.host_limits and overlap.device_ms is None
    verdict = analysis.verdict
    assert verdict.kind == "host" and "the device waits for it" in verdict.limit
    section = host.section(analysis)
    assert section is not None and "The host is what limits" in section.lead


@pytest.mark.parametrize(("device_us", "exposed_ms"), [(8000.0, 0.0), (1000.0, 30.0)])
def test_a_collection_costs_the_engine_only_where_it_did_not_wait_for_the_device(
    device_us: float, exposed_ms: float
) -> None:
    run = ran(
        device_us=device_us, host_us=4000.0, process=[1, 1], t_s=[0.5, 1.0], pause_us=[10_000.0, 20_000.0]
    )
    analysis = RunAnalysis(run)
    time = analysis.step_time
    section = gc.section(analysis)
    hidden = "30 ms were hidden" if not exposed_ms else "0 µs were hidden"
    assert section is not None and hidden in section.lead, section.lead
    assert time.gc_s == pytest.approx(0.03)
    assert time.exposed_gc_s == pytest.approx(exposed_ms / 1000.0)


def test_an_engine_that_waits_for_each_batch_hides_nothing() -> None:
    run = ran(device_us=8000.0, host_us=4000.0)
    engine = EngineInfo(vllm="0.32.0", device="cpu", async_scheduling=False)
    import msgspec

    run = replace(run, header=msgspec.structs.replace(run.header, engine=engine))
    analysis = RunAnalysis(run)
    assert analysis.overlap is None and analysis.ceiling is None
    assert analysis.step_time.exposed_host_s == pytest.approx(STEPS * 3000e-6)


def test_the_ceiling_is_set_by_the_process_that_needs_most_for_a_token() -> None:
    analysis = RunAnalysis(ran(device_us=0.0, host_us=40.0, source="host"))
    ceiling = analysis.ceiling
    assert ceiling is not None and ceiling.process == "front_end"
    assert ceiling.cpu_us_per_token == {"front_end": pytest.approx(12.0), "engine_core": pytest.approx(5.0)}
    assert ceiling.tokens_s == pytest.approx(1e6 / 12)
    assert sum(ceiling.phases_us.values()) == pytest.approx(5.0)
    assert ceiling.phases_us["schedule"] == pytest.approx(2.0)
    facts = summary(analysis)
    assert facts["ceiling"]["tokens_s"] == pytest.approx(1e6 / 12)
    text = summary_text(analysis)
    assert "83,333 output tokens/s; front end sets it" in text
    assert "the front end sets that, with 12.0 us a token" in " ".join(text.split())


def test_a_ceiling_that_was_not_measured_says_why() -> None:
    """A busy host: the front end was sampled once."""
    whole = ran(device_us=0.0, host_us=40.0, source="host")
    memory = {name: column[1:] for name, column in whole.table("memory").items()}
    analysis = RunAnalysis(replace(whole, tables={**whole.tables, "memory": memory}))
    assert analysis.ceiling is None
    assert analysis.no_ceiling.startswith("the front end had too few samples while 1,000 tokens came")
    section = host.section(analysis)
    assert section is not None
    assert f"not measured: {analysis.no_ceiling}" in dict(section.facts).values()
    assert RunAnalysis(whole).no_ceiling == ""


def test_a_devices_ceiling_takes_enginecores_own_work_because_its_waits_may_spin() -> None:
    ceiling = RunAnalysis(ran(device_us=8000.0, host_us=200.0)).ceiling
    assert ceiling is not None and ceiling.cpu_us_per_token["engine_core"] == pytest.approx(20.0)
    assert ceiling.process == "engine_core"


def test_pauses_that_the_device_hid_are_not_what_limits() -> None:
    pauses = {
        "process": [1] * 100,
        "t_s": [0.0401 + i * 0.04 for i in range(100)],
        "pause_us": [3000.0] * 100,
    }
    exposed = RunAnalysis(ran(device_us=1000.0, host_us=4000.0, **pauses)).verdict
    assert exposed.kind == "host", "the pauses are part of the host's own work"
    hidden = RunAnalysis(ran(device_us=8000.0, host_us=4000.0, **pauses)).verdict
    assert hidden.kind == "model" and "collector" not in hidden.limit.split(".")[0]


def test_a_front_end_that_was_not_sampled_leaves_no_ceiling() -> None:
    import msgspec

    run = ran(device_us=0.0, host_us=40.0, source="host")
    more = [ProcessInfo(pid=6, role="front_end")]
    header = msgspec.structs.replace(run.header, processes=[*run.header.processes, *more])
    assert RunAnalysis(Run(header, run.tables)).ceiling is None


def with_gpu(run: Run, busy: int, executor: str = "uni") -> RunAnalysis:
    engine = replace_struct(run.header.engine, executor=executor)
    devices = table("devices", device=[0] * 4, t_s=[0.0, 1.0, 2.0, 3.0], busy_percent=[busy] * 4)
    return RunAnalysis(Run(replace_struct(run.header, engine=engine), {**run.tables, "devices": devices}))


DEVICE, HOST = {"device_us": 8100.0, "host_us": 2300.0}, {"device_us": 1000.0, "host_us": 8000.0}


@pytest.mark.parametrize(
    ("costs", "busy", "executor", "who", "said"),
    [
        (DEVICE, 97, "uni", "The device:", "NVML saw the GPUs busy 97 % of the time. Cache"),
        (
            DEVICE,
            30,
            "mp",
            "The device or its workers:",
            "busy 30 % of the time, which contradicts that: EngineCore",
        ),
        (DEVICE, 30, "mp", "The device or its workers:", "EngineCore waited for the workers' Python."),
        (DEVICE, 30, "uni", "The device:", "EngineCore waited for something else than kernels."),
        (HOST, 40, "uni", "The host:", "busy 40 % of the time."),
        (
            HOST,
            99,
            "uni",
            "The host:",
            "which contradicts that: launches that wait for the driver's full queue",
        ),
    ],
)
def test_what_nvml_saw_stands_beside_the_verdict_and_contradicts_it_aloud(
    costs: dict[str, float], busy: int, executor: str, who: str, said: str
) -> None:
    analysis = with_gpu(ran(**costs), busy, executor)
    assert who in analysis.verdict.limit and said in analysis.verdict.limit
    section = host.section(analysis)
    assert section is not None and f"busy {busy} %" in str(section.lead)


def test_a_gpu_that_counts_no_use_contradicts_nothing() -> None:
    assert "NVML" not in with_gpu(ran(**DEVICE), 0).verdict.limit
