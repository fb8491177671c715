"""The data type in which a recorded engine kept recurrent states. Pure; reads what every run file holds."""

from __future__ import annotations

from kvtune.run.types import EngineInfo


def state_dtype(engine: EngineInfo) -> str:
    """`float32`, `bfloat16` ..; empty for a model without states, or a run without captured KV specs.

    A state has several tensors; the recurrent one, the last and largest, is the one whose type the platform decides.
    """
    for spec in engine.kv_specs.get("specs", []):
        dtypes = spec.get("fields", {}).get("dtypes")
        if dtypes:
            last = list(dtypes.get("$tuple", []))[-1:]
            return str(last[0].get("$dtype", "")) if last else ""
    return ""
