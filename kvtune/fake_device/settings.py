"""The device of `--on host`, which the launcher describes in a JSON file of the work folder.

Plain data; imports nothing of vLLM.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from kvtune.errors import KvtuneError
from kvtune.fake_device.copies import CopyTime
from kvtune.fake_device.cost import NOMINAL, StepCost
from kvtune.files import replacing

DEVICE_FILE = "device.json"

TIMED = "timed"
"""`engine.device` of a run on a simulated device."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated device. `cost`: of each step. `specs`: KV specs captured from a run, or {}. `name`: for reports.

    `engine_args`: flags of the recorded engine; the user's own flags override them. `given`: names of all these flags,
    whose settings keep their values. `copy`: the time of copies to and from a tier of host memory. `like_device`: the
    device of --like-device, whose defaults (chunk, max_num_seqs, blocks) are used without `specs`; "": this machine has
    them.
    """

    cost: StepCost
    name: str
    specs: dict[str, Any] = {}
    engine_args: list[str] = []
    given: list[str] = []
    copy: CopyTime = CopyTime()
    like_device: str = ""


def constant(step_us: float) -> Device:
    """Return a device on which every step takes `step_us` microseconds; 0: no time."""
    cost = StepCost(step_us=step_us, prefill_token_us=0.0, decode_us=0.0, kv_token_us=0.0)
    return Device(cost=cost, name=f"{step_us:g} us a step" if step_us else "takes no time")


def nominal() -> Device:
    """Return a large accelerator in round figures, for simulations without a run that shows how long a step takes."""
    return Device(cost=NOMINAL, name="round figures for a large accelerator")


def write_device(device: Device, folder: Path) -> None:
    with replacing(folder / DEVICE_FILE) as part:
        part.write(msgspec.json.encode(device))


def read_device() -> Device:
    """Read the device of this engine's run. KvtuneError in a process that kvtune did not start."""
    folder = os.environ.get("KVTUNE_RUN_DIR", "")
    try:
        return msgspec.json.decode((Path(folder) / DEVICE_FILE).read_bytes(), type=Device)
    except (OSError, msgspec.DecodeError) as error:
        raise KvtuneError(
            f"no simulated device is described in {folder or 'KVTUNE_RUN_DIR'}: {error}",
            "start it with `kvtune profile MODEL --on host`",
        ) from error
