"""kvtune's policy of a tier of host memory where vLLM's are most ahead of it, on loads that a search found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune.sim.simulators import Simulators
from tests.bench import tier_adversary

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

WORST: list[dict[str, Any]] = json.loads(
    (Path(tier_adversary.__file__).parent / "worst_tier_loads.json").read_text()
)
MOST_POINTS = 14.0
"""Of the tokens that can hit; docs/results.md states it."""


@pytest.mark.parametrize("load", WORST[:4], ids=lambda load: f"{load['times']}x of {load['blocks']}")
def test_the_worst_loads_known_are_not_worse_than_they_were(
    load: dict[str, Any], simulators: Simulators, tmp_path: Path
) -> None:
    points, row = tier_adversary.behind(load, tmp_path, simulators)
    assert row["hittable"] >= tier_adversary.LEAST_HITTABLE and {"kvtune", "lru", "arc"} <= row.keys()
    assert 0.5 < points < MOST_POINTS
