"""What `--like RUN` takes from a recorded run: its engine's flags and KV specs, and what its steps cost."""

from __future__ import annotations

import msgspec

from kvtune.device.copies import GIB, INSTANT, CopyTime
from kvtune.device.cost import NOMINAL, StepCost, read_cost
from kvtune.device.settings import Device
from kvtune.engine.offload_flags import refuse_code
from kvtune.errors import KvtuneError, UsageError
from kvtune.run.types import EngineInfo, Run
from kvtune.sim.cost import Clock, fit


def engine_of(run: Run) -> EngineInfo:
    """The run's engine. KvtuneError where the run does not hold its KV specs."""
    engine = run.header.engine
    refuse_code(engine.args, "--like: the run file")
    if not engine.kv_specs:
        raise KvtuneError("--like: the run file has no KV specs", "record it again with this kvtune")
    if engine.engines > 1:
        raise UsageError(
            f"--like: {engine.engines} engines shared that run's load, a replay is of one",
            "record a run with --data-parallel-size 1, or see `kvtune explain`, which replays each engine",
        )
    return engine


def device_of(run: Run) -> Device:
    """A device that takes the time that the run's own took. KvtuneError where its steps do not say."""
    engine = engine_of(run)
    stored = run.header.extra.step_cost
    cost = cost_of(run) if stored else fit(run, "device")
    name = f"like {engine.device_name or engine.device}"
    copy = copy_of(run)
    return Device(cost=cost, name=name, specs=engine.kv_specs, engine_args=engine.args, copy=copy)


def cost_of(run: Run, clock: Clock | None = None) -> StepCost:
    """The cost that a simulated run ran with; else fitted to the run's steps, or nominal where there are too few."""
    stored = run.header.extra.step_cost
    if stored:
        return read_cost(msgspec.json.encode(stored).decode())
    try:
        return fit(run, clock)
    except KvtuneError:
        return NOMINAL


def copy_of(run: Run) -> CopyTime:
    """The pace of a run's copies to and from host memory. A CPU engine's are done when they are submitted."""
    if run.header.source == "engine" and run.header.engine.device == "cpu":
        return INSTANT
    usual = CopyTime()
    return CopyTime(
        store_gib_s=_pace(run, "stored_bytes", "store_us") or usual.store_gib_s,
        load_gib_s=_pace(run, "loaded_bytes", "load_us") or usual.load_gib_s,
    )


def _pace(run: Run, bytes_of: str, time_us: str) -> float:
    """GiB/s; 0 where nothing was copied."""
    copies = run.table("copies")
    seconds = float(copies[time_us].sum()) / 1e6
    return float(copies[bytes_of].sum()) / GIB / seconds if seconds else 0.0
