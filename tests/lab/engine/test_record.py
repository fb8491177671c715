"""A work folder as an engine leaves it, made into a run: what is measured when the run ends early."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from kvtune.base.errors import EXIT_INTERRUPTED, KvtuneError
from kvtune.data.run.types import Run
from kvtune.lab.engine.driver import RequestLog
from kvtune.lab.engine.launch import HostOutcome
from kvtune.lab.engine.messages import REQUESTS_FILE, HostPlan, Served
from kvtune.lab.engine.process import ProcessSampler, Sample
from kvtune.lab.engine.record import record
from kvtune.lab.setup.setup import Setup
from kvtune.plugin.probe.records import Collection, Step
from kvtune.plugin.probe.ring import Ring
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from kvtune.requests.loads.spec import build

SPEC = "rounds:prefixes=4,prefix=96,suffix=32,output=2,rounds=5"
MS = 1_000_000
START = 1_000 * MS
INTERRUPTED = KvtuneError("interrupted", "", EXIT_INTERRUPTED)


def step(start_ns: int) -> Step:
    times = (start_ns, 50 * MS, MS, 48 * MS, MS, 20 * MS)
    return Step(False, 1, *times, 1, 0, 1, 0, 99, 0, 0, 0, 0, 0, 0)


def made(folder: Path, outcome: HostOutcome, probe: str = "light") -> Run:
    return record(
        folder,
        HostPlan(setup=Setup(model="m", engine_args=["--hf-token", "hush"]), vllm_args=[]),
        build(SPEC),
        outcome,
        command=["kvtune", "tune", "--study", "postgresql://u:hu/sh@host/d"],
        probe_level=probe,
        decided={"block_size": "flag"},
    )


def recorded(
    folder: Path, *, error: KvtuneError | None = INTERRUPTED, end_ns: int = 0, probe: str = "light"
) -> Run:
    """Six of twenty requests answered, one a second, the seventh sent; the last step ends 6.05 s after the start.

    The shutdown that follows takes 10 s, with a collection and a memory sample in each second.
    """
    pid = os.getpid()
    if probe != "off":
        (folder / f"status-{pid}.json").write_text(json.dumps({"pid": pid, "role": "engine_core"}))
        ring = Ring(folder / "ring-1.bin", 1 << 16)
        for second in range(7):
            ring.write(step(START + second * 1_000 * MS))
        for second in range(16):
            ring.write(Collection(2, START + second * 1_000 * MS + 10 * MS, 5 * MS, 0, 0, 0, 0, 0, -1))
    log = RequestLog(folder / REQUESTS_FILE)
    for index in range(6):
        sent = START + index * 1_000 * MS
        times = np.array([sent + 20 * MS, sent + 45 * MS], "i8")
        counts = np.array([1, 1], "i4")
        log.append(Served(index, sent, sent + 45 * MS, 0, 2, "length", times.tobytes(), counts.tobytes()))
    log.append(Served(6, START + 6_000 * MS, 0, -1, 0, "", b"", b""))
    log._file.close()
    samples = [Sample(pid, START + n * 1_000 * MS, 1 << 20, 0, 1.0, 1) for n in range(16)]
    outcome = HostOutcome(
        "2026-01-01T00:00:00+00:00",
        0,
        start_ns=START,
        end_ns=end_ns,
        error=error,
        sampler=ProcessSampler(pid, samples=samples),
    )
    return made(folder, outcome, probe)


def test_a_run_that_ended_early_ends_with_its_last_step(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    assert run.header.state == "partial"
    assert run.header.wall_s == pytest.approx(6.05)
    assert len(run.table("gc")["t_s"]) == 7 and run.table("gc")["t_s"].max() < 6.05
    assert run.table("memory")["t_s"].max() < 6.05
    assert run.header.extra.ledger["0"].collections == 7
    fields = summary(RunAnalysis(run, build(SPEC)))
    assert fields["throughput_tok_s"] == pytest.approx(12 / 6.05)
    assert fields["gc"]["engine_core"]["share_of_step"] == pytest.approx(7 * 5 / (7 * 50))


def test_what_was_not_sent_is_not_counted(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    fields = summary(RunAnalysis(run, build(SPEC)))
    assert (fields["requests"], fields["finished"]) == (7, 6)
    assert fields["prefix_cache"]["query_tokens"] == 6 * 128
    rounds = [(r["round"], r["requests"], r["query_tokens"]) for r in fields["rounds"]]
    assert rounds == [(0, 4, 4 * 128), (1, 3, 2 * 128)]


def test_without_steps_a_run_that_ended_early_ends_with_its_last_token(tmp_path: Path) -> None:
    assert recorded(tmp_path, probe="off").header.wall_s == pytest.approx(5.045)


def test_a_host_that_named_its_end_is_believed(tmp_path: Path) -> None:
    run = recorded(tmp_path, error=None, end_ns=START + 7_500 * MS)
    assert run.header.wall_s == pytest.approx(7.5) and len(run.table("gc")["t_s"]) == 8


def test_a_run_that_ended_before_its_first_step_has_no_length(tmp_path: Path) -> None:
    run = made(tmp_path, HostOutcome("2026-01-01T00:00:00+00:00", 0, start_ns=START, error=INTERRUPTED))
    fields = summary(RunAnalysis(run, build(SPEC)))
    assert (fields["wall_s"], fields["throughput_tok_s"], fields["rounds"]) == (0.0, None, [])


def test_the_run_says_where_its_settings_come_from(tmp_path: Path) -> None:
    run = made(tmp_path, HostOutcome("2026-01-01T00:00:00+00:00", 0, start_ns=START))
    assert run.header.engine.origins == {"block_size": "flag"}
