"""Devices as a command line asks for them, and what of an engine's flags they take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtune.device.settings import Device, constant, read_device, write_device
from kvtune.engine import profile as module
from kvtune.engine.profile import ProfileJob, engine_arguments
from kvtune.errors import KvtuneError
from kvtune.run.file import read_run
from kvtune.sim.like import device_of
from kvtune.workload.spec import build

GALLERY = Path(__file__).parents[2] / "reports" / "gallery"


def job(*flags: str, device: Device) -> ProfileJob:
    return ProfileJob(model="tiny-opt", workload=build("decode:requests=2"), engine_args=flags, device=device)


def test_a_device_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = constant(8000.0)
    write_device(device, tmp_path)
    monkeypatch.setenv("KVTUNE_RUN_DIR", str(tmp_path))
    assert read_device() == device and device.name == "8000 us a step"
    assert constant(0.0).name == "takes no time"


def test_an_executor_without_a_device_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTUNE_RUN_DIR", raising=False)
    with pytest.raises(KvtuneError) as error:
        read_device()
    assert "--on host" in error.value.hint


def test_a_device_like_a_run_has_its_flags_blocks_and_step_times() -> None:
    run = read_run(GALLERY / "rounds-stock.kvrun")
    device = device_of(run)
    assert device.specs == run.header.engine.kv_specs and device.engine_args == run.header.engine.args
    steps = run.table("steps")
    typical_us = float(np.median(steps["execute_us"][steps["prefill_tokens"] == 0]))
    assert device.cost.fitted and device.cost.clock == "device"
    assert device.cost.step_us + device.cost.decode_us <= 2 * typical_us, (
        "the model's time, not the whole step's"
    )
    flags = engine_arguments(job("--max-num-seqs", "8", device=device))
    assert flags == [*run.header.engine.args, "--max-num-seqs", "8"]


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ((), ["--max-num-batched-tokens", "8192", "--max-num-seqs", "1024"]),
        (("--max-num-batched-tokens", "512"), ["--max-num-seqs", "512"]),
        (("--max-num-seqs", "16384"), ["--max-num-batched-tokens", "16384"]),
        (("--max-num-batched-tokens", "8k"), []),
        (("--max-num-seqs", "8", "--max-num-batched-tokens", "64"), []),
    ],
)
def test_a_machine_without_a_gpu_takes_a_gpus_defaults(
    given: tuple[str, ...], added: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_cpu_build", lambda: True)
    assert module._gpu_flags(job(*given, device=constant(0.0)), given) == added
    monkeypatch.setattr(module, "is_cpu_build", lambda: False)
    assert module._gpu_flags(job(*given, device=constant(0.0)), given) == []
