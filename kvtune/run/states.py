"""The data type of a recorded engine's recurrent states. Pure."""

from __future__ import annotations

from kvtune.run.types import EngineInfo


def state_dtype(engine: EngineInfo) -> str:
    """`float32`, `bfloat16`, and so on; empty for a model without states, or a run without captured KV specs.

    Of a state's tensors, the last (and largest) is the recurrent one, whose data type the platform chooses.
    """
    for spec in engine.kv_specs.get("specs", []):
        dtypes = spec.get("fields", {}).get("dtypes")
        if dtypes:
            last = list(dtypes.get("$tuple", []))[-1:]
            return str(last[0].get("$dtype", "")) if last else ""
    return ""
