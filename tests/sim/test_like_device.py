"""vLLM's own answers for a GPU that is not here: --like-device forces vLLM's CUDA platform in a simulator."""

from __future__ import annotations

from typing import Any

import pytest

from kvtune.engine.setup import Setup, Simulated
from kvtune.run.types import Run
from kvtune.sim.simulators import Simulators
from kvtune.vllm.platforms import DEVICES
from tests.sim.test_replay import replays

pytestmark = pytest.mark.vllm

ROUNDS = 3
WORK = f"rounds:prefixes=4,prefix=6000,suffix=200,output=8,rounds={ROUNDS}"


def on_h100(model: str, *flags: str, core: Any = "stock") -> Setup:
    args = ["--max-model-len", "32768", *flags]
    return Setup(
        model=model, engine_args=args, core=core, device=Simulated(), platform=DEVICES["h100"]
    ).sized()


def hits(run: Run) -> list[int]:
    """Percent of the prompt tokens of each round that hit."""
    requests = run.table("requests")
    rounds = [requests["round"] == number for number in range(ROUNDS)]
    return [round(100 * requests["hit_tokens"][r].sum() / requests["prompt_tokens"][r].sum()) for r in rounds]


def test_a_quantized_models_pool_is_what_its_weights_leave(simulators: Simulators) -> None:
    stock, ours = replays(
        simulators, WORK, [on_h100("gpt-oss-20b", core=core) for core in ("stock", "kvtune")]
    )
    assert stock.header.engine.num_blocks == 165_094 and stock.header.engine.block_size == 16
    assert stock.header.engine.device == "cuda"
    assert hits(stock) == [0, 0, 97] and hits(ours) == [0, 97, 97]


def test_latent_attention_is_cached(simulators: Simulators) -> None:
    (run,) = replays(simulators, WORK, [on_h100("deepseek-v3", "--tensor-parallel-size", "16")])
    assert run.header.engine.settings["enable_prefix_caching"] and hits(run) == [0, 97, 97]
    assert {spec["$spec"] for spec in run.header.engine.kv_specs["specs"]} == {"MLAAttentionSpec"}


def test_states_are_one_ranks(simulators: Simulators) -> None:
    flags = [["--tensor-parallel-size", ranks] for ranks in ("1", "4")]
    one, four = replays(simulators, WORK, [on_h100("nemotron-3-nano", *each) for each in flags])
    assert [run.header.engine.block_size for run in (one, four)] == [2096, 1056]
    assert one.header.engine.num_blocks < four.header.engine.num_blocks
