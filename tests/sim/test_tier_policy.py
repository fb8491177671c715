"""kvtune's policy of a tier of host memory where vLLM's are most ahead of it, on loads that a search found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtune.device.copies import GIB
from kvtune.sim.settings import SimSettings
from kvtune.sim.simulators import Simulators
from tests.tools.bench import loads

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

WORST: list[dict[str, Any]] = json.loads(Path(loads.__file__).with_name("worst_tier_loads.json").read_text())
MOST_POINTS = 14.0
"""Of the tokens that can hit; docs/results.md states it."""
POLICIES = ("kvtune", "lru", "arc")
BLOCK_BYTES = 32_768
"""Of a block of 32 tokens."""


def side(load: dict[str, Any], policy: str) -> SimSettings:
    """The engine with a tier of `times` pools and this eviction policy; stock's core."""
    plain = loads.columns(load["model"], load["blocks"], [], loads.LONGEST)["stock 0"]
    extra = {"kv_connector_extra_config": {"eviction_policy": policy}}
    size = load["times"] * load["blocks"] * BLOCK_BYTES / GIB
    flags = ["--kv-offloading-size", str(size), "--kv-transfer-config", json.dumps(extra)]
    return msgspec.structs.replace(plain, engine_args=[*plain.engine_args, *flags])


@pytest.mark.full
@pytest.mark.parametrize("load", WORST[:4], ids=lambda load: f"{load['times']}x of {load['blocks']}")
def test_the_worst_loads_known_are_not_worse_than_they_were(
    load: dict[str, Any], simulators: Simulators, tmp_path: Path
) -> None:
    sides = {policy: side(load, policy) for policy in POLICIES}
    row = loads.measure(loads.write(load, tmp_path), sides, simulators, load["seed"])
    assert row["hittable"] >= 25.0
    assert 0.5 < max(row["lru"], row["arc"]) - row["kvtune"] < MOST_POINTS
