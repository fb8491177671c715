"""Reads from a recorded run what a replay of its engine needs: model, flags, KV specs, step cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.file_flags import allowed_flags
from kvtune.data.flags import flag_value, with_flag
from kvtune.data.layout.models import builtin
from kvtune.data.run.types import EngineInfo, Run
from kvtune.lab.device.cost import GIB, INSTANT, NOMINAL, CopyTime, StepCost, read_cost
from kvtune.lab.device.fit import fit


def engine_of(run: Run, *, trusted: bool = False, several: bool = False) -> EngineInfo:
    """Return the run's engine. UsageError for a flag that a file may not give, KvtuneError if KV specs are missing.

    `several`: it is one of several that share the load; otherwise a run of several engines is refused.
    """
    engine = run.header.engine
    flags = allowed_flags(engine.args, "--like: the run file", trusted=trusted)
    if not engine.kv_specs:
        if run.header.source == "server":
            raise UsageError(
                "--like: a recording of a server has no KV specs: the server does not publish them",
                "replay its log with kvtune explain RUN --trace LOG --model MODEL, or take a run of kvtune profile",
            )
        raise KvtuneError("--like: the run file has no KV specs", "record it again with this kvtune")
    if engine.engines > 1 and not several:
        raise UsageError(
            f"--like: {engine.engines} engines shared that run's load, a replay is of one",
            f"add --replicas {engine.engines}; or see `kvtune explain`, which replays them as they were routed",
        )
    return msgspec.structs.replace(engine, args=with_flag(flags, "data-parallel-size", None))


BY_SPECS = (
    *(
        "attention-backend",
        "dtype",
        "gdn-prefill-backend",
        "kv-cache-dtype",
        "load-format",
        "mamba-cache-dtype",
    ),
    *("mamba-ssm-cache-dtype", "max-model-len", "quantization"),
)
"""Flags whose effect is in the captured KV specs. They are dropped for a stand-in model, which may not support them."""


def model_and_flags(run: Run, *, named: str = "", trusted: bool = False) -> tuple[str, list[str]]:
    """Return the model to replay a run with, and the engine's flags. A model that only the file names is not opened.

    `named`: the model that the user named. `trusted`: the user vouches for the file. Without either, the model is
    built into kvtune: the run's own, or a stand-in, as the KV specs are in the run.
    """
    header = run.header
    flags = allowed_flags(header.engine.args, "the run file", trusted=trusted)
    if named or trusted or builtin(header.model) is not None:
        model = named or header.model
        if header.source == "server" and builtin(model) is not None and not flag_value(flags, "dtype"):
            # kvtune runs its built-in models in another type than a server does, which takes the config's.
            flags = with_flag(flags, "dtype", "auto")
        return model, flags
    if not header.engine.kv_specs:
        raise UsageError(
            f"the run file has no KV specs, and its model {header.model!a} is only named in the file",
            "name the model yourself: --model MODEL; or, for a file of your own, add --trust",
        )
    for name in BY_SPECS:
        flags = with_flag(flags, name, None)
    return stand_in(header.engine.kv_specs, flags), flags


def stand_in(specs: Mapping[str, Any], flags: Sequence[str] = ()) -> str:
    """Return the built-in model that vLLM schedules like a model with these KV specs; its own specs are not used.

    vLLM takes `--speculative-config` with method mtp for an architecture with such layers only.
    """
    if '"method":"mtp"' in (flag_value(flags, "speculative-config") or "").replace(" ", ""):
        return "tiny-qwen3next"
    text = msgspec.json.encode(specs).decode()
    if '"MambaSpec"' not in text:
        return "tiny-llama"
    return "tiny-granite" if '"mamba2"' in text.lower() else "tiny-qwen3next"


def cost_of(run: Run) -> StepCost:
    """Return a simulated run's own step cost, else a cost fitted to the run's steps; nominal for too few steps."""
    stored = run.header.extra.step_cost
    return read_cost(msgspec.json.encode(stored).decode()) if stored else fitted(run)


def fitted(run: Run) -> StepCost:
    """Return a cost fitted to the run's steps; nominal for too few steps."""
    try:
        return fit(run)
    except KvtuneError:
        return NOMINAL


def copy_of(run: Run) -> CopyTime:
    """Return the speed of a run's copies to and from host memory. Copies of a CPU engine take no time."""
    if run.header.source == "engine" and run.header.engine.device == "cpu":
        return INSTANT
    usual = CopyTime()
    return CopyTime(
        store_gib_s=_pace(run, "stored_bytes", "store_us") or usual.store_gib_s,
        load_gib_s=_pace(run, "loaded_bytes", "load_us") or usual.load_gib_s,
    )


def _pace(run: Run, bytes_of: str, time_us: str) -> float:
    """Return the speed of these copies in GiB/s; 0 if the run has no such copies."""
    copies = run.table("copies")
    seconds = float(copies[time_us].sum()) / 1e6
    return float(copies[bytes_of].sum()) / GIB / seconds if seconds else 0.0
