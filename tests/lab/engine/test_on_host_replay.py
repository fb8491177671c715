"""Asynchronous scheduling, real and replayed: `--on host`'s engine and the simulator hit the same tokens and make the
same batches. One request at a time, in pools where blocks run out: nothing hangs on the machine's speed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvtune.data.flags import with_flag
from kvtune.data.run.types import Run
from kvtune.lab.device.settings import constant
from kvtune.lab.engine.profile import EngineBench
from kvtune.lab.setup.setup import Load, Setup
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Workload
from tests.simulator import SHARED, on

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

PROMPTS = "zipf:prefixes=6,prefix={prefix},suffix=40,requests=24,output=12,concurrency=1"
MODELS = {  # a prefix in tokens; the pool in blocks, too small for all prompts
    "tiny-llama": (800, 200),
    "tiny-gemma3": (800, 700),
    "tiny-qwen3next": (2100, 30),
}
BLOCK = {"tiny-llama": 16, "tiny-gemma3": 16}
"""Tokens: versions of vLLM differ in their default. A model with states takes what its layers need."""


@pytest.mark.parametrize("core", ["stock", "kvtune"])
@pytest.mark.parametrize("model", MODELS)
def test_engine_and_replay_agree_under_asynchronous_scheduling(model: str, core: str, tmp_path: Path) -> None:
    prefix, blocks = MODELS[model]
    work = build(PROMPTS.format(prefix=prefix), seed=0)
    run = recorded(work, model, core, ("--num-gpu-blocks-override", str(blocks)), tmp_path)
    settings = Setup.of_run(run)
    wide = with_flag(settings.engine_args, "num-gpu-blocks-override", 10 * blocks)
    with SHARED.simulators() as simulators:
        both = dict(simulators.run(on(work, [settings, msgspec.structs.replace(settings, engine_args=wide)])))
    replayed, wider = both[0], both[1]
    assert isinstance(replayed, Run) and isinstance(wider, Run)
    hits = run.table("requests")["hit_tokens"].tolist()
    assert replayed.table("requests")["hit_tokens"].tolist() == hits
    assert batches(replayed) == batches(run)
    assert 0 < sum(hits) < int(wider.table("requests")["hit_tokens"].sum()), (
        "blocks that would hit are evicted"
    )


@pytest.mark.parametrize("core", ["stock", "kvtune"])
@pytest.mark.parametrize("model", MODELS)
def test_a_tier_of_host_memory_hits_the_same_tokens_in_both(model: str, core: str, tmp_path: Path) -> None:
    prefix, blocks = MODELS[model] if model != "tiny-gemma3" else (800, 450)
    work = build(PROMPTS.format(prefix=prefix), seed=0)
    flags = ("--num-gpu-blocks-override", str(blocks), "--kv-offloading-size", "0.05")
    run = recorded(work, model, core, flags, tmp_path)
    with SHARED.simulators() as simulators:
        ((_, replayed),) = simulators.run(on(work, [Setup.of_run(run)]))
    assert isinstance(replayed, Run)
    for hits in ("hit_tokens", "tier_hit_tokens"):
        assert replayed.table("requests")[hits].tolist() == run.table("requests")[hits].tolist()
    assert batches(replayed) == batches(run)
    assert int(run.table("requests")["tier_hit_tokens"].sum()) > 0


def recorded(work: Workload, model: str, core: str, flags: tuple[str, ...], folder: Path) -> Run:
    """A run on a device whose steps take half a millisecond."""
    block = ("--block-size", str(BLOCK[model])) if model in BLOCK else ()
    done = EngineBench(folder).run(
        Setup(
            model=model,
            load=Load.of(work),
            core=core,
            engine_args=["--max-num-batched-tokens", "512", "--max-model-len", "2400", *block, *flags],
            device=constant(500.0),
        )
    )
    assert done.error is None
    assert done.run.header.engine.async_scheduling and done.run.header.core.active == (core == "kvtune")
    return done.run


def batches(run: Run) -> list[tuple[int, int]]:
    """Of each batch that computed something: its tokens and its requests."""
    steps = run.table("steps")
    of_each = zip(steps["scheduled_tokens"].tolist(), steps["requests"].tolist(), strict=True)
    return [batch for batch in of_each if batch[0]]
