"""Samples GPUs with NVML: use, memory, power, clock, PCIe traffic. Needs no CUDA.

Called by a thread of the CLI's process. `nvidia-ml-py` comes with vLLM's CUDA build. Without it, or without a driver,
nothing is sampled, and `why` gives the reason. Not run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from types import ModuleType
from typing import Any

from kvtune.data.run.extras import GpuFacts


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One sample of a GPU; unknown figures are 0. `busy_percent`: share of time in which a kernel ran."""

    device: int
    at_ns: int
    busy_percent: int
    memory_bytes: int
    power_w: float
    clock_mhz: int
    pcie_sent_bytes_s: int
    pcie_received_bytes_s: int


@dataclass(slots=True)
class DeviceSampler:
    """Samples the GPUs in CUDA_VISIBLE_DEVICES (else all), but only the first `most`: those that the engine uses.

    `names`, `facts`: one for each GPU, by `DeviceSample.device`.
    """

    samples: list[DeviceSample] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    facts: list[GpuFacts] = field(default_factory=list)
    most: int | None = None
    why: str = ""
    _nvml: ModuleType | None = None
    _handles: list[object] = field(default_factory=list)

    def start(self) -> None:
        try:
            pynvml = importlib.import_module("pynvml")
        except ImportError:
            self.why = "nvidia-ml-py is not installed"
            return
        try:
            pynvml.nvmlInit()
            for handle in _visible(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))[: self.most]:
                self.names.append(_text(pynvml.nvmlDeviceGetName(handle)))
                self.facts.append(_facts(pynvml, handle))
                self._handles.append(handle)
            self._nvml = pynvml
        except Exception as error:  # no driver, no permission: whatever NVML says
            self.why = f"NVML does not answer: {error}"

    @property
    def running(self) -> bool:
        return self._nvml is not None

    def sample(self) -> None:
        nvml = self._nvml
        if nvml is None:
            return
        for device, handle in enumerate(self._handles):
            try:
                self.samples.append(_sample(nvml, device, handle))
            except Exception as error:  # a device that was lost: the others go on
                self.why = self.why or f"NVML failed: {error}"

    def note(self, engine_device: str) -> list[str]:
        """Return a note why the GPU was not sampled; [] if it was, or if the engine uses no GPU."""
        return [f"the GPU was not sampled: {self.why}"] if engine_device == "cuda" and self.why else []

    def stop(self) -> None:
        if self._nvml is not None:
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()
            self._nvml = None


def _visible(nvml: ModuleType, named: str | None) -> list[object]:
    if named is None:
        return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    words = [word.strip() for word in named.split(",") if word.strip()]
    return [
        nvml.nvmlDeviceGetHandleByIndex(int(word)) if word.isdigit() else nvml.nvmlDeviceGetHandleByUUID(word)
        for word in words
    ]


def _text(name: object) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _facts(nvml: ModuleType, handle: object) -> GpuFacts:
    memory = _asked(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
    driver, limit_mw = "", _asked(nvml, lambda: nvml.nvmlDeviceGetPowerManagementLimit(handle))
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        driver = _text(nvml.nvmlSystemGetDriverVersion())
    return GpuFacts(memory_bytes=memory, driver=driver, power_limit_w=limit_mw / 1000.0)


def _sample(nvml: ModuleType, device: int, handle: object) -> DeviceSample:
    def kib_s(kind: str) -> int:  # over 20 ms
        return _asked(nvml, lambda: nvml.nvmlDeviceGetPcieThroughput(handle, getattr(nvml, kind)))

    return DeviceSample(
        device=device,
        at_ns=monotonic_ns(),
        busy_percent=_asked(nvml, lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        memory_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).used),
        power_w=_asked(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle)) / 1000.0,
        clock_mhz=_asked(nvml, lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
        pcie_sent_bytes_s=1024 * kib_s("NVML_PCIE_UTIL_TX_BYTES"),
        pcie_received_bytes_s=1024 * kib_s("NVML_PCIE_UTIL_RX_BYTES"),
    )


def _asked(nvml: ModuleType, ask: Callable[[], Any]) -> int:
    """Return what NVML answers; 0 where it does not, as not every GPU counts all: a MIG instance reports no use."""
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        return int(ask())
    return 0
