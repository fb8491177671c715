"""GPUs by NVML: a stand-in for `pynvml` plays what a GPU says, also one that counts little or is lost."""

from __future__ import annotations

import os
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtune.data.run.extras import GpuFacts
from kvtune.data.run.types import Run
from kvtune.lab.engine.device import DeviceSample, DeviceSampler
from kvtune.lab.engine.launch import HostOutcome
from kvtune.lab.engine.process import ProcessSampler
from kvtune.lab.engine.rings import devices_table
from kvtune.reading.analysis.memory import device_use, kv_bytes
from kvtune.reading.report.sections.lanes import LANES
from tests.reading.analysis.made import header_of, table

GIB = 2**30
# By device: busy %, memory in use, milliwatts, MHz, KB/s sent and received, sample by sample. Made, not recorded.
PLAYED = {
    "GPU-a": [(0, 1 * GIB, 70_000, 345, 10, 20), (93, 60 * GIB, 640_000, 1_980, 1_000, 5_000)],
    "GPU-b": [(50, 2 * GIB, None, 1_500, None, None)] * 2,
}


class NvmlError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Two GPUs; the second one counts neither power nor PCIe traffic."""
    fake: Any = ModuleType("pynvml")
    turn = dict.fromkeys(PLAYED, -1)  # before the first sample, the GPU's facts are asked

    def now(handle: str, field: int) -> int:
        value = PLAYED[handle][min(max(turn[handle], 0), len(PLAYED[handle]) - 1)][field]
        if value is None:
            raise NvmlError("Not Supported")
        return value

    def memory(handle: str) -> SimpleNamespace:
        used = now(handle, 1)
        turn[handle] += 1  # the last thing that a sample asks
        return SimpleNamespace(used=used)

    fake.NVMLError, fake.NVML_CLOCK_SM = NvmlError, 1
    fake.NVML_PCIE_UTIL_TX_BYTES, fake.NVML_PCIE_UTIL_RX_BYTES = 4, 5
    fake.nvmlInit = fake.nvmlShutdown = lambda: None
    fake.nvmlDeviceGetCount = lambda: len(PLAYED)
    fake.nvmlDeviceGetHandleByIndex = lambda index: list(PLAYED)[index]
    fake.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    fake.nvmlDeviceGetName = lambda handle: f"Made {handle}".encode()
    fake.nvmlDeviceGetUtilizationRates = lambda handle: SimpleNamespace(gpu=now(handle, 0))
    fake.nvmlDeviceGetMemoryInfo = memory
    fake.nvmlDeviceGetPowerUsage = lambda handle: now(handle, 2)
    fake.nvmlDeviceGetClockInfo = lambda handle, kind: now(handle, 3)
    fake.nvmlDeviceGetPcieThroughput = now
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def sampled(times: int = 2) -> DeviceSampler:
    sampler = DeviceSampler()
    sampler.start()
    for _ in range(times):
        sampler.sample()
    sampler.stop()
    return sampler


def test_every_gpu_is_sampled_in_its_units(nvml: ModuleType) -> None:
    sampler = sampled()
    assert sampler.names == ["Made GPU-a", "Made GPU-b"] and not sampler.why
    busy = [s for s in sampler.samples if s.device == 0][1]
    assert (busy.busy_percent, busy.memory_bytes, busy.power_w) == (93, 60 * GIB, 640.0)
    assert (busy.clock_mhz, busy.pcie_sent_bytes_s, busy.pcie_received_bytes_s) == (
        1_980,
        1_024_000,
        5_120_000,
    )
    quiet = next(s for s in sampler.samples if s.device == 1)
    assert (quiet.power_w, quiet.pcie_sent_bytes_s, quiet.busy_percent) == (0.0, 0, 50)


@pytest.mark.parametrize(("visible", "names"), [("1", ["Made GPU-b"]), ("GPU-a", ["Made GPU-a"]), ("", [])])
def test_only_visible_gpus_are_sampled(
    nvml: ModuleType, monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert sampled().names == names


def test_without_nvml_nothing_is_sampled_and_a_gpu_engines_run_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    sampler = sampled()
    assert not sampler.samples
    assert sampler.note("cuda") == ["the GPU was not sampled: nvidia-ml-py is not installed"]
    assert sampler.note("cpu") == []


def test_a_machine_without_a_driver_is_no_error(nvml: Any) -> None:
    def no_driver() -> None:
        raise NvmlError("Driver Not Loaded")

    nvml.nvmlInit = no_driver
    sampler = sampled()
    assert not sampler.samples and "Driver Not Loaded" in sampler.note("cuda")[0]


def test_a_gpu_that_is_lost_leaves_the_others(nvml: Any) -> None:
    memory = nvml.nvmlDeviceGetMemoryInfo

    def lost(handle: str) -> object:
        if handle == "GPU-a":
            raise NvmlError("GPU is lost")
        return memory(handle)

    nvml.nvmlDeviceGetMemoryInfo = lost
    sampler = sampled()
    assert {s.device for s in sampler.samples} == {1} and "GPU is lost" in sampler.note("cuda")[0]


def recorded() -> Run:
    """Three samples over two seconds, the last one after the measuring phase."""
    second = 1_000_000_000
    samples = [
        DeviceSample(0, (10 + i) * second, busy, memory, watts, 1_980, 1_000, 3_000)
        for i, (busy, memory, watts) in enumerate(
            ((50, 20 * GIB, 300.0), (100, 60 * GIB, 500.0), (0, 0, 70.0))
        )
    ]
    outcome = HostOutcome("", 0, start_ns=10 * second, end_ns=11 * second)
    steps = table("steps", t_s=[0.0, 0.5, 0.9], process=[1, 1, 1], free_blocks=[100, 25, 50])
    run = Run(header_of(), {"devices": devices_table(samples, outcome), "steps": steps})
    return run.with_extra(devices=["Made GPU"])


def test_figures_are_of_the_measuring_phase() -> None:
    (use,) = device_use(recorded())
    assert (use.name, use.busy_share, use.memory_peak_bytes) == ("Made GPU", 0.75, 60 * GIB)
    assert (use.power_w, use.energy_j, use.pcie_received_bytes_s) == (400.0, 400.0, 3_000.0)
    assert device_use(Run(header_of(), {})) == []


def test_kv_bytes_are_what_blocks_of_requests_held_of_the_pool() -> None:
    held = kv_bytes(recorded(), 1_000_000)
    assert held is not None and held.reserved_bytes == 1_000_000
    assert held.used_peak_bytes == 750_000
    assert held.used_mean_bytes == int(np.mean([0.0, 0.75, 0.5]) * 1_000_000)
    assert kv_bytes(Run(header_of(), {}), 1_000_000) is None and kv_bytes(recorded(), 0) is None


def test_the_timeline_has_a_lane_for_use_power_and_memory() -> None:
    run = recorded()
    lanes = {lane.name for lane in LANES if lane.rows(run, 1.0) is not None}
    assert {"gpu_busy", "gpu_power", "gpu_memory"} <= lanes
    without = Run(header_of(), {})
    assert all(lane.rows(without, 1.0) is None for lane in LANES)


def test_only_as_many_gpus_as_the_engine_uses_are_sampled(nvml: ModuleType) -> None:
    sampler = DeviceSampler(most=1)
    sampler.start()
    sampler.sample()
    assert sampler.names == ["Made GPU-a"] and {s.device for s in sampler.samples} == {0}


def test_a_part_of_a_gpu_without_a_use_of_its_own_is_sampled_nevertheless(nvml: ModuleType) -> None:
    """NVML refuses the utilization of a MIG device."""

    def refuse(handle: str) -> None:
        raise NvmlError("Not Supported")

    nvml.nvmlDeviceGetUtilizationRates = refuse  # type: ignore[attr-defined]
    sampler = sampled(2)
    assert not sampler.why and [s.busy_percent for s in sampler.samples] == [0] * 4
    assert max(s.memory_bytes for s in sampler.samples) == 60 * GIB


def test_memory_driver_and_power_limit_are_kept_of_each_gpu(nvml: ModuleType) -> None:
    fake: Any = nvml
    fake.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(total=80 * GIB, used=GIB)
    fake.nvmlSystemGetDriverVersion = lambda: b"580.65.06"
    fake.nvmlDeviceGetPowerManagementLimit = lambda handle: 700_000
    assert sampled().facts == [GpuFacts(memory_bytes=80 * GIB, driver="580.65.06", power_limit_w=700.0)] * 2


def test_a_slow_gpu_does_not_delay_the_samples_of_processes(nvml: ModuleType) -> None:
    """PCIe traffic alone takes NVML 40 ms a GPU: processes are sampled while it waits."""
    asked, answer = threading.Event(), threading.Event()

    def traffic(handle: str, kind: int) -> int:
        asked.set()
        answer.wait(30)
        return 0

    nvml.nvmlDeviceGetPcieThroughput = traffic  # type: ignore[attr-defined]
    sampler = ProcessSampler(os.getpid(), interval_s=0.001)
    sampler.start()
    assert asked.wait(30)
    before = len(sampler.samples)
    while len(sampler.samples) < before + 3:
        threading.Event().wait(0.001)
    answer.set()
    sampler.stop()
    assert sampler.devices.samples
