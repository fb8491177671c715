"""Devices as a command line asks for them, and what of an engine's flags they take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtune.base.errors import KvtuneError
from kvtune.data.platforms import defaults
from kvtune.data.run.file import read_run
from kvtune.lab.device.settings import Timed, constant, read_device, write_device
from kvtune.lab.setup import platform
from kvtune.lab.setup.platform import Gpu
from kvtune.lab.setup.setup import Setup

GALLERY = Path(__file__).parents[3] / "reports" / "gallery"


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
    asked = Setup(model="tiny-opt", engine_args=["--max-num-seqs", "8"], device=constant(0.0))
    setup = asked.like(run)
    assert isinstance(setup.device, Timed) and setup.device.specs == run.header.engine.kv_specs
    cost, steps = setup.device.cost, run.table("steps")
    typical_us = float(np.median(steps["execute_us"][steps["prefill_tokens"] == 0]))
    assert cost.fitted and cost.clock == "device"
    assert cost.step_us + cost.decode_us <= 2 * typical_us, "the model's time, not the whole step's"
    assert setup.engine_args == [*run.header.engine.args, "--max-num-seqs", "8"]


def test_a_device_that_only_takes_time_stands_for_a_large_gpu_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "installed_for", lambda: "cpu")
    assert (platform.engines(timed=True).key, platform.engines().kind) == ("h100", "cpu")
    monkeypatch.setattr(platform, "installed_for", lambda: "gpu")
    monkeypatch.setattr(platform, "gpus", lambda: [Gpu("NVIDIA L4", 23_034, 0, "580.65", (8, 9))])
    here = platform.engines(timed=True)
    assert (here.name, here.key, here.capability) == ("NVIDIA L4", "", (8, 9))
    assert defaults(here)["max_num_seqs"].value == 256
