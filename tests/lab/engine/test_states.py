"""The table of states on the real CPU engine: tiny hybrids hit as the table's replays say, cell by cell.

Not here: cells with drafts, as MTP of Qwen3-Next does not run on a CPU (`run_fused_precopy`, a Triton kernel), and
stock on tiny-granite, whose Mamba-2 crashes there with prefix caching: the core's `whole_states` runs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtune.answers.changes import Change, situation
from kvtune.answers.states.table import offered
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.spec import build
from tests.lab.engine.real import lockstep, profiled
from tests.simulator import SHARED

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

LOAD = "rounds:prefixes=2,prefix=2900,suffix=1400,output=4,rounds=3"
AGAIN = "rounds:prefixes=2,prefix=3000,suffix=0,output=4,rounds=2"
BLOCKS = 120
FLAGS = [
    *("--max-num-batched-tokens", "8192", "--max-num-seqs", "8", "--max-model-len", "5000"),
    *("--load-format", "kvtune-seeded"),
]
GRANITE = [*FLAGS, "--enable-prefix-caching"]
CORES: dict[str, dict[str, Any]] = {
    "tiny-qwen3next": {"cores": ["stock"]},
    "tiny-granite": {"cores": ["kvtune"], "core_settings": {"whole_states": True}},
}


def cells(model: str, flags: list[str]) -> list[Change]:
    """The table's rows without drafts."""
    core = CORES[model]
    setup = Setup(
        model=model,
        engine_args=[*flags, "--num-gpu-blocks-override", str(BLOCKS)],
        core=core["cores"][0],
        core_settings=core.get("core_settings", {}),
    ).sized()
    with SHARED.simulators(model) as simulators:
        run = simulators.replay(setup.with_load(build(AGAIN)))
    here = situation(setup, run.header.engine)
    assert here.states
    return [
        Change("as it is", setup, kept="as it is"),
        *(c for c in offered(here) if not c.why_not and "num_speculative_tokens" not in c.settings),
    ]


@pytest.mark.parametrize(("model", "flags"), [("tiny-qwen3next", FLAGS), ("tiny-granite", GRANITE)])
def test_each_cell_hits_on_the_engine_what_its_replay_hits(
    model: str, flags: list[str], tmp_path: Path
) -> None:
    hits: dict[str, list[list[int]]] = {}
    for number, change in enumerate(cells(model, flags)):
        folder = tmp_path / str(number)
        folder.mkdir()
        args = Setup(model=model, engine_args=flags).with_knobs(change.settings).engine_args
        loads = [{"workload": load, "blocks": BLOCKS} for load in (LOAD, AGAIN)]
        cases = lockstep(folder, {"model": model, "args": args, "cases": loads, **CORES[model]})["cases"]
        for case in cases:
            real, simulated = case["hits"]
            assert real == simulated and min(real) >= 0, (change, case["workload"])
            assert case["digests"][0] == case["digests"][1], change
        hits[change.kept or ""] = [case["hits"][0] for case in cases]
    plain = hits["as it is"]
    second = slice(2, 4)  # of two prefixes
    every = next(of for kept, of in hits.items() if kept.startswith("every"))
    assert sum(plain[0][second]) == 0 < sum(every[0][second]), "an interval hits at the second visit"
    finer = next(of for kept, of in hits.items() if kept.startswith("at the ends"))
    assert sum(finer[1]) > sum(plain[1]), "a finer unit hits more of a prompt sent again"


def test_a_measured_engine_hits_as_a_simulated_one_where_prompts_have_several_chunks(tmp_path: Path) -> None:
    load = "rounds:prefixes=1,prefix=2800,suffix=200,output=4,rounds=3"
    hits = []
    for on in ("engine", "sim"):
        ran = profiled(tmp_path, "tiny-qwen3next", "-w", load, "--core", "stock", "--on", on)
        hits.append([each["hit_tokens"] for each in ran.facts["rounds"]])
    assert hits[0] == hits[1] and hits[0][1] > 2048
