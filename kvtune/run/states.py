"""The data type of a recorded engine's recurrent states. Pure."""

from __future__ import annotations

from kvtune.run.types import EngineInfo


def state_dtype(engine: EngineInfo) -> str:
    """Return `float32`, `bfloat16`, and so on; "" for a model without states or a run without KV specs.

    A state's last (and largest) tensor is the recurrent one, whose data type the platform chooses.
    """
    for spec in engine.kv_specs.get("specs", []):
        dtypes = spec.get("fields", {}).get("dtypes")
        if dtypes:
            last = list(dtypes.get("$tuple", []))[-1:]
            return str(last[0].get("$dtype", "")) if last else ""
    return ""
