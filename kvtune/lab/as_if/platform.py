"""Makes this process's vLLM that of another device: vLLM's own CUDA platform class, with the device's figures.

Call `force` once, before vLLM is imported, in a process that serves nothing else: vLLM's modules choose by the platform
when they are imported. What only a GPU has is a stand-in (`absent.py`); tensors are on torch's meta device.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvtune.base.errors import KvtuneError
from kvtune.data.platforms import Platform
from kvtune.lab.as_if import absent
from kvtune.plugin.vllm.plugin_state import STATE

GPU = re.compile(r"cuda(:\d+)?")

MOST_DEVICES = 1024
"""vLLM starts no more workers on one machine than it has devices: there are enough for any number of ranks."""

OPT_IN_SHARED_MEMORY = {8: 166_912, 9: 232_448, 10: 232_448, 12: 101_376}
"""Bytes of shared memory that a block of threads may ask for, by major capability (CUDA's programming guide)."""


def force(platform: Platform) -> None:
    """Make this process's vLLM run on `platform`, a CUDA device. KvtuneError if vLLM is imported already."""
    if STATE.platform == platform:
        return
    if STATE.platform is not None or "vllm" in sys.modules:
        raise KvtuneError(
            f"this process's vLLM is not that of {platform.title}",
            "ask in a process that has not imported vLLM",
        )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["VLLM_HAS_FLASHINFER_CUBIN"] = "1"
    import xgrammar  # noqa: F401 - with the packages that it finds itself

    absent.install()
    _torch_on(platform)
    _platform_of(platform)
    STATE.platform = platform


def _torch_on(platform: Platform) -> None:
    """Let torch's questions about the device be answered by the platform's figures."""
    import torch

    cuda: Any = torch.cuda
    properties = Properties(platform)
    cuda.current_device = lambda: 0
    cuda.current_stream = lambda *_: absent.Absent("torch.cuda.current_stream()")
    cuda.get_device_capability = lambda *_: platform.capability
    cuda.get_device_name = lambda *_: platform.name
    cuda.get_device_properties = lambda *_: properties
    cuda.Event = cuda.Stream = type("OnNoDevice", (Unused,), {})
    torch.Event = cuda.Event
    torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *_: None
    torch.version.cuda = "13.0"


class Unused:
    """An event or stream: made, and never waited for."""

    def __init__(self, *_: object, **__: object) -> None:
        pass


class Properties:
    """The device's properties, as torch gives them; those that are not known here are asked of a stand-in."""

    def __init__(self, platform: Platform) -> None:
        self.name = self.gcnArchName = platform.name  # torch's CUDA build gives the name for both
        self.major, self.minor = platform.capability
        self.total_memory = platform.memory_bytes
        self.multi_processor_count = platform.multiprocessors
        self.shared_memory_per_block_optin = OPT_IN_SHARED_MEMORY.get(platform.capability[0], 0)
        self.warp_size = 32
        self.is_integrated = False

    def __getattr__(self, name: str) -> absent.Absent:
        return absent.Absent(f"torch.cuda.get_device_properties().{name}")


def _platform_of(platform: Platform) -> None:
    """Make vLLM's CUDA platform class the current platform, with answers about the device from `platform`."""
    import vllm.platforms as platforms

    modules: Any = platforms
    modules.vllm_version_matches_substr = lambda _: False  # not a CPU build
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    def has_capability(capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        least = capability if isinstance(capability, tuple) else divmod(capability, 10)
        return platform.capability >= least

    answers: dict[str, Callable[..., object]] = {
        "get_device_capability": lambda device_id=0: DeviceCapability(*platform.capability),
        "has_device_capability": has_capability,
        "get_device_name": lambda device_id=0: platform.name,
        "get_device_uuid": lambda device_id=0: f"GPU-{device_id}",
        "get_device_total_memory": lambda device_id=0: platform.memory_bytes,
        "is_fully_connected": lambda physical_device_ids: True,
        "device_count": lambda: MOST_DEVICES,
        "is_pin_memory_available": lambda: False,  # decides where host copies lie, no block
        "get_device_numa_node": lambda device_id=0: None,
        "get_all_device_numa_nodes": lambda: None,
        "log_warnings": lambda: None,
    }
    forced = type("Forced", (CudaPlatformBase,), {name: staticmethod(answers[name]) for name in answers})
    modules._current_platform = forced()


def check_answered() -> None:
    """Raise KvtuneError if vLLM asked something that only the device's own vLLM answers."""
    if STATE.asked and STATE.platform is not None:
        raise KvtuneError(
            f"what vLLM does on {STATE.platform.title} depends on {', '.join(STATE.asked)}, which only a vLLM "
            "built for it knows",
            "profile it where it runs: `kvtune explain RUN` replays from the KV specs in the run file",
        )


def check_kernels(backends: Sequence[Any], architectures: str) -> None:
    """Raise KvtuneError for an attention backend that vLLM does not have for the device: some models ask for none."""
    if (platform := STATE.platform) is None:
        return
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(*platform.capability)
    lacking = [each.get_name() for each in backends if not each.supports_compute_capability(capability)]
    if lacking:
        number = ".".join(map(str, platform.capability))
        raise KvtuneError(
            f"{architectures} takes {', '.join(sorted(lacking))}, which vLLM does not have for {platform.title}, "
            f"compute capability {number}",
            "simulate a device that has it: --like-device h100 or b200",
        )


@contextmanager
def on_meta() -> Iterator[None]:
    """Let torch make tensors without memory, those for a GPU, too. Single numbers keep their value."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnMeta(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            named = dict(kwargs or {})
            if func is torch.tensor and args and isinstance(args[0], int | float):
                named["device"] = "cpu"
            elif _is_gpu(named.get("device")):
                named["device"] = "meta"
            return func(*("meta" if _is_gpu(each, or_number=False) else each for each in args), **named)

    with torch.device("meta"), OnMeta():
        yield


def _is_gpu(device: object, *, or_number: bool = True) -> bool:
    """Whether a device is a GPU. `or_number`: a number is one, too."""
    import torch

    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    if isinstance(device, str):
        return GPU.fullmatch(device) is not None
    return or_number and type(device) is int
