"""Models that no CPU builds, from the KV specs that vLLM gives their layers on an H100 or a B200 (kv_specs/*.json).

The specs were made by vLLM 0.32's own model classes on the meta device, with vLLM's CUDA platform; `groups` is how vLLM
grouped the layers there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtune.lab.device.kv_specs import OF_LATER_VERSIONS
from kvtune.lab.setup.like import stand_in
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from tests.choice import first_of
from tests.lab.sim.test_replay import replays
from tests.lab.sim.verdicts.test_speculation import looks_ahead

pytestmark = pytest.mark.vllm

FOLDER = Path(__file__).parent / "kv_specs"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))
PREFIX = 6000
WORK = f"rounds:prefixes=2,prefix={PREFIX},suffix=200,output=8,rounds=3"
HELPED = {"deepseek-v4-flash"}
"""Models with windows that the core keeps."""


@pytest.mark.parametrize("name", first_of(["deepseek-v3.2", "llama-3.1-8b-b200", "deepseek-v4-flash"]))
def test_a_run_with_mtp_is_replayed_without_its_model(name: str, simulators: Simulators) -> None:
    captured = json.loads((FOLDER / f"{name}.json").read_text())
    flags = ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1})]
    wanted = [
        Setup(model=stand_in(captured, args), engine_args=args, device=Simulated(specs=captured))
        for args in ([], flags)
    ]
    plain, drafting = replays(simulators, WORK, wanted)
    assert sorted(map(sorted, drafting.header.engine.kv_specs["groups"])) == sorted(
        map(sorted, captured["groups"])
    )
    hits = [run.table("requests")["hit_tokens"] for run in (plain, drafting)]
    assert hits[1].sum() > 0
    # A hit of a drafter ends a block earlier, where no window decides what is hit.
    unit = plain.header.engine.settings["hit_alignment_tokens"]
    # vLLM 0.33 hashes a block with the token that follows it: with one there, the block counts.
    followed = looks_ahead() and PREFIX % unit
    assert hits[0].sum() > hits[1].sum() or name in HELPED or followed


def of_layers(captured: dict[str, Any]) -> dict[str, Any]:
    """Each layer's spec, without what vLLM 0.33 has in it and the recordings of 0.32 have not."""
    return {
        name: {**spec, "fields": {k: v for k, v in spec["fields"].items() if k not in OF_LATER_VERSIONS}}
        for name, number in captured["layers"].items()
        for spec in [captured["specs"][number]]
    }


@pytest.mark.parametrize("name", first_of(NAMES))
def test_a_replay_groups_the_layers_as_the_engine_did(name: str, simulators: Simulators) -> None:
    captured = json.loads((FOLDER / f"{name}.json").read_text())
    stock, ours = (
        replays(
            simulators, WORK, [Setup(model=stand_in(captured), core=core, device=Simulated(specs=captured))]
        )[0]
        for core in ("stock", "kvtune")
    )
    for run in (stock, ours):
        again = json.loads(json.dumps(run.header.engine.kv_specs))
        assert sorted(map(sorted, again["groups"])) == sorted(map(sorted, captured["groups"]))
        assert of_layers(again) == of_layers(captured), "a replay of the replay is the same"
    hits = [run.table("requests")["hit_tokens"] for run in (stock, ours)]
    assert hits[0].sum() > 0 and (hits[1] >= hits[0]).all()
    assert (hits[1].sum() > hits[0].sum()) == (name in HELPED)
    assert not any("gave up" in note for note in ours.header.notes)
