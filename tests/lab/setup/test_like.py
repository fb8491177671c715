"""What a replay takes from a recorded run: the run's model stays closed, and one of kvtune's own stands in for it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvtune.base.errors import UsageError
from kvtune.data.run.types import Run
from kvtune.lab.setup.like import model_and_flags, stand_in
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.simulators import Simulators
from kvtune.requests.loads.spec import build
from tests.choice import first_of
from tests.simulator import on

CHAT = "chat:sessions=4,turns=3,system=300,first=1200,user=60,output=10,concurrency=3"
CASES = [
    ("gemma-3-4b", 400, ["--max-model-len", "16384", "--dtype", "bfloat16"]),
    ("opt-125m", 300, []),
    ("tiny-qwen3next", 60, ["--max-model-len", "4096"]),
    ("tiny-granite", 60, ["--max-model-len", "4096", "--enable-prefix-caching"]),
]


def elsewhere(run: Run) -> Run:
    """The run as of a model that is not here."""
    return Run(msgspec.structs.replace(run.header, model="/models/not-here"), run.tables)


@pytest.mark.vllm
@pytest.mark.parametrize(("model", "blocks", "flags"), first_of(CASES[::-1]))
def test_a_model_that_stands_in_schedules_every_step_as_the_runs_own(
    simulators: Simulators, model: str, blocks: int, flags: list[str]
) -> None:
    workload = build(CHAT)
    engine = Setup(model=model, engine_args=["--num-gpu-blocks-override", str(blocks), *flags], core="kvtune")
    ((_, own),) = simulators.run(on(workload, [engine]))
    assert isinstance(own, Run), own
    settings = Setup.of_run(elsewhere(own))
    assert settings.model.startswith("tiny-")
    ((_, other),) = simulators.run(on(workload, [settings]))
    assert isinstance(other, Run), other
    for table, columns in (
        ("requests", ("hit_tokens", "preemptions")),
        ("steps", ("scheduled_tokens", "free_blocks", "running")),
    ):
        for column in columns:
            np.testing.assert_array_equal(own.table(table)[column], other.table(table)[column])
    assert own.table("requests")["hit_tokens"].sum() > 0


def test_the_kind_of_states_chooses_what_stands_in() -> None:
    def of(kind: str, **fields: str) -> str:
        return stand_in({"specs": [{"$spec": kind, "fields": fields}]})

    assert of("FullAttentionSpec") == of("SlidingWindowSpec") == "tiny-llama"
    assert of("MambaSpec", mamba_type="mamba2") == "tiny-granite"
    assert of("MambaSpec", mamba_type="gdn_attention") == "tiny-qwen3next"


def test_the_user_names_the_model_or_trusts_the_file(made_run: Run) -> None:
    run = elsewhere(made_run)
    with pytest.raises(UsageError, match="only named in the file") as refused:
        model_and_flags(run)
    assert "--model" in refused.value.hint and "--trust" in refused.value.hint
    flags = made_run.header.engine.args
    assert model_and_flags(run, named="mine") == ("mine", flags)
    assert model_and_flags(run, trusted=True) == ("/models/not-here", flags)
    assert model_and_flags(made_run) == (made_run.header.model, flags)


@pytest.fixture
def made_run() -> Run:
    from tests.golden.synthetic import header

    return Run(header(), {})
