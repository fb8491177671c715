"""The data type of recurrent states is read from the captured KV specs."""

from __future__ import annotations

from typing import Any

import pytest

from kvtune.data.run.types import EngineInfo


def specs(*dtypes: str) -> dict[str, Any]:
    """Captured specs: attention, and a state whose tensors have these types."""
    state = {"$spec": "MambaSpec", "fields": {"dtypes": {"$tuple": [{"$dtype": d} for d in dtypes]}}}
    attention = {"$spec": "FullAttentionSpec", "fields": {"dtype": {"$dtype": "bfloat16"}}}
    return {"specs": [attention, state] if dtypes else [attention]}


@pytest.mark.parametrize(
    ("kv_specs", "dtype"),
    [
        (specs("bfloat16", "float32"), "float32"),
        (specs("bfloat16", "bfloat16"), "bfloat16"),
        (specs("float16"), "float16"),
        (specs(), ""),
        ({}, ""),
    ],
)
def test_the_last_tensor_of_a_state_has_its_type(kv_specs: dict[str, Any], dtype: str) -> None:
    assert EngineInfo(kv_specs=kv_specs).state_dtype == dtype
