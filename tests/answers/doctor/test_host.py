"""What `kvtune doctor` says of the host; the measurement itself is in tests/lab/engine/test_doctor_host.py."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvtune.answers.doctor import diagnosis, host
from kvtune.answers.doctor.finding import Finding
from kvtune.base.errors import KvtuneError
from kvtune.base.scratch import MARK, sweep
from kvtune.data.run.types import Run
from kvtune.lab.engine.profile import Profiled
from kvtune.lab.setup.setup import Setup
from tests.labs import FakeLab
from tests.reading.analysis.test_overlap import ran


def test_the_ceiling_and_what_sets_it_are_told() -> None:
    run = ran(device_us=0.0, host_us=40.0, source="host")
    lab = FakeLab(lambda setup, output: Profiled(run, Path("a.kvrun"), None))
    (finding,) = host.host_findings(lab)
    assert finding.level == "ok" and "83,333 output tokens/s" in finding.text
    assert "front end 12.0 us" in finding.text and "EngineCore 5.0 us" in finding.text


def without_samples(run: Run) -> Run:
    memory = {name: column[:1] for name, column in run.table("memory").items()}
    return replace(run, tables={**run.tables, "memory": memory})


def test_a_run_that_was_too_short_is_made_longer() -> None:
    run, loads = ran(device_us=0.0, host_us=40.0, source="host"), []

    def short_once(setup: Setup, output: Path) -> Profiled:
        loads.append(max(request.output_tokens for request in setup.load.built().requests))
        return Profiled(run if len(loads) > 1 else without_samples(run), Path("a.kvrun"), None)

    lab = FakeLab(short_once)
    (finding,) = host.host_findings(lab)
    assert finding.level == "ok" and loads == [200, 800]


def test_a_host_that_is_never_sampled_is_a_note() -> None:
    run = without_samples(ran(device_us=0.0, host_us=40.0, source="host"))
    lab = FakeLab(lambda setup, output: Profiled(run, Path("a.kvrun"), None))
    (finding,) = host.host_findings(lab)
    assert finding.level == "note" and "too few samples" in finding.text


def test_a_measurement_that_fails_is_a_note() -> None:
    def fails(setup: Setup, output: Path) -> Profiled:
        raise KvtuneError("vLLM is not installed", "install it")

    lab = FakeLab(fails)
    (finding,) = host.host_findings(lab)
    assert (
        finding.level == "note" and "vLLM is not installed" in finding.text and finding.hint == "install it"
    )


@pytest.mark.parametrize("asked", [True, False])
def test_the_host_is_measured_only_where_that_was_asked_for(
    asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "environment", lambda folder: ())
    monkeypatch.setattr(host, "host_findings", lambda lab: iter([Finding("ok", "host", "drives")]))
    found = diagnosis.examine(None, [], tmp_path, measure_host=asked)
    assert [finding.text for finding in found.environment if finding.topic == "host"] == ["drives"] * asked


def test_another_command_does_not_sweep_the_folder_of_the_measurement() -> None:
    run = ran(device_us=0.0, host_us=40.0, source="host")

    def measured(setup: Setup, output: Path) -> Profiled:
        os.utime(output, (0, 0))
        assert sweep(output.parent) == []
        assert output.stat().st_mode & 0o777 == 0o700 and (output / MARK).exists()
        return Profiled(run, output / "a.kvrun", None)

    lab = FakeLab(measured)
    (finding,) = host.host_findings(lab)
    assert finding.level == "ok"
