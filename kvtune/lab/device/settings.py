"""The device of `--on host`, which the launcher describes in a JSON file of the work folder.

Plain data; imports nothing of vLLM.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from kvtune.base.errors import KvtuneError
from kvtune.base.files import replacing
from kvtune.lab.device.cost import NOMINAL, CopyTime, StepCost

DEVICE_FILE = "device.json"

TIMED = "timed"
"""`engine.device` of a run on a timed device."""


class Timed(msgspec.Struct, frozen=True, kw_only=True, tag="timed"):
    """A simulated device: its steps take time, and no model runs. `cost`: of each step. `name`: for reports.

    `specs`: KV specs captured from a run, or {}. `copy`: the time of copies to and from a tier of host memory.
    The launcher adds `given`, the names of the flags whose settings keep their values.
    """

    cost: StepCost
    name: str
    specs: dict[str, Any] = {}
    copy: CopyTime = CopyTime()
    given: list[str] = []


def constant(step_us: float) -> Timed:
    """Return a device on which every step takes `step_us` microseconds; 0: no time."""
    cost = StepCost(step_us=step_us, prefill_token_us=0.0, decode_us=0.0, kv_token_us=0.0)
    return Timed(cost=cost, name=f"{step_us:g} us a step" if step_us else "takes no time")


def nominal() -> Timed:
    """Return a large accelerator in round figures, for simulations without a run that shows how long a step takes."""
    return Timed(cost=NOMINAL, name="round figures for a large accelerator")


def write_device(device: Timed, folder: Path) -> None:
    with replacing(folder / DEVICE_FILE) as part:
        part.write(msgspec.json.encode(device))


def read_device() -> Timed:
    """Read the device of this engine's run. KvtuneError in a process that kvtune did not start."""
    folder = os.environ.get("KVTUNE_RUN_DIR", "")
    try:
        return msgspec.json.decode((Path(folder) / DEVICE_FILE).read_bytes(), type=Timed)
    except (OSError, msgspec.DecodeError) as error:
        raise KvtuneError(
            f"no simulated device is described in {folder or 'KVTUNE_RUN_DIR'}: {error}",
            "start it with `kvtune profile MODEL --on host`",
        ) from error
