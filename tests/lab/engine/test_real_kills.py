"""The real engine when one of its processes is killed: results are kept, nothing is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from kvtune.data.run.file import read_run
from kvtune.lab.device.settings import Timed, nominal
from kvtune.lab.engine.messages import Event
from kvtune.lab.engine.profile import EngineBench, Profiled
from kvtune.lab.setup.setup import Load, Real, Setup
from kvtune.reading.analysis.offload import offload
from kvtune.requests.loads.spec import build
from tests.choice import first_of
from tests.lab.engine.real import (
    commands,
    engine_of,
    in_shared_memory,
    left_in_shared_memory,
    measured_until_the_last_step,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

REAL = Real()
DECODES = "decode:requests=4000,prompt=48,output=16,concurrency=64"


def profile_and_kill(
    output: Path,
    role: str,
    core: Literal["kvtune", "stock"] = "stock",
    model: str = "tiny-opt",
    work: str = DECODES,
    flags: Sequence[str] = (),
    device: Real | Timed = REAL,
) -> Profiled:
    """Kill one process of the engine once some requests have finished."""
    job = Setup(model=model, load=Load.of(build(work)), core=core, engine_args=list(flags), device=device)
    killed: list[int] = []

    def on_event(event: Event) -> None:
        if event.kind != "progress" or event.finished < 64 or killed:
            return
        for pid, command in commands(engine_of(output)).items():
            if role in command:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

    result = EngineBench(output).run(job, on_event)
    assert killed, f"no process {role} was found"
    return result


@pytest.mark.full
@pytest.mark.parametrize(
    ("role", "core", "device"),
    first_of(
        [
            ("EngineCore", "kvtune", nominal()),
            ("EngineCore", "kvtune", REAL),
            ("EngineCore", "stock", REAL),
            ("Worker", "kvtune", REAL),
        ]
    ),
)
def test_an_engine_that_is_killed_leaves_a_partial_run(
    tmp_path: Path, role: str, core: Literal["kvtune", "stock"], device: Real | Timed
) -> None:
    """With the core the outputs of 64 requests at once are columns, and callers wait otherwise."""
    shared_before = in_shared_memory()
    result = profile_and_kill(tmp_path, role, core, device=device)
    assert result.error is not None and result.error.exit_code == 1
    run = read_run(result.path)
    assert run.header.state == "partial" and run.header.why
    finished = run.table("requests")["finish"] == "length"
    assert 64 <= finished.sum() < 4000
    assert len(run.table("steps")["t_s"]) > 10
    assert len(run.table("memory")["t_s"]) > 0
    measured_until_the_last_step(run)
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]
    process = "EngineCore" if role == "EngineCore" else "VllmWorker-0"
    assert result.error.message == run.header.why
    # On a busy machine vLLM sees a worker's end a moment before its exit code.
    ends = [
        f"{process} was killed by SIGKILL",
        f"{process} died, by a signal it seems: vLLM saw no exit code",
    ]
    assert run.header.why in [f"the engine failed: {end}" for end in ends[: 1 + (role == "Worker")]]
    assert any("unexpectedly" in line for line in result.error.details)
    log = result.path.with_suffix(".log")
    assert f"the engine's whole log is {log}" in result.error.hint and "KV cache" in log.read_text()
    assert not left_in_shared_memory(shared_before)


STORES = "zipf:prefixes=12,prefix=500,suffix=40,requests=4000,concurrency=4,output=2"
TIER = [
    *("--block-size", "32", "--max-model-len", "1000", "--max-num-batched-tokens", "512"),
    *("--num-gpu-blocks-override", "70", "--kv-offloading-size", "0.05"),
]


@pytest.mark.full
@pytest.mark.parametrize("role", ["EngineCore", "Worker"])
def test_an_engine_that_is_killed_while_it_copies_leaves_what_it_copied(tmp_path: Path, role: str) -> None:
    """Nearly every step stores or loads: the pool holds few prefixes, and answers are short."""
    shared_before = in_shared_memory()
    result = profile_and_kill(tmp_path, role, "stock", "tiny-llama", STORES, TIER)
    assert result.error is not None and result.error.exit_code == 1
    run = read_run(result.path)
    assert run.header.state == "partial" and run.header.why
    assert 64 <= (run.table("requests")["finish"] == "length").sum() < 4000
    copies, steps = run.table("copies"), run.table("steps")
    assert len(copies["t_s"]) > len(steps["t_s"]) / 2
    last_s = copies["t_s"].max()
    assert last_s > 0.8 * run.header.wall_s, "copies went on until the end"
    tier = offload(run)
    assert tier is not None and tier.copies is not None
    assert tier.copies.stored_bytes > 0 and tier.copies.loads > 0 and tier.tier_hit_tokens > 0
    measured_until_the_last_step(run)
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]
    assert not left_in_shared_memory(shared_before)
