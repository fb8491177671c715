"""Explain on engines with a tier of host memory: causes, remedies against them, each replayed."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest

from kvtune.answers.changes import Situation
from kvtune.answers.explain.document import document
from kvtune.answers.explain.remedies import candidates
from kvtune.data.run.types import EngineInfo, Run
from kvtune.data.show.screen import document_lines
from kvtune.lab.device.cost import INSTANT
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.requests.loads.spec import build
from tests.answers.explain.replayed import explain
from tests.reading.analysis.test_offload import with_tier
from tests.simulator import simulate

ROUNDS = "rounds:prefixes=6,prefix=700,suffix=40,output=8,rounds=3"
FLAGS = ["--block-size", "32", "--max-model-len", "1000", "--max-num-batched-tokens", "512"]


def at(*flags: str, **more: float) -> Situation:
    chosen = Setup(model="m", engine_args=list(flags), core="kvtune")
    pool_gib = more.get("pool_gib", 0.0)
    return Situation(chosen, blocks=100, unit=128, retention=0, window=512, states=False, pool_gib=pool_gib)


def changes(misses: dict[str, int], where: Situation) -> list[str]:
    return [option.change for option in candidates(misses, 1000, where)]


def test_a_tier_that_is_too_small_is_tried_larger() -> None:
    small = at("--kv-offloading-size", "0.5")
    for cause in ("evicted_from_both", "store_refused", "stored_late"):
        assert sorted(changes({cause: 500}, small)[:2]) == [
            "--kv-offloading-size 0.5 -> 1",
            "--kv-offloading-size 0.5 -> 2",
        ]
    largest, larger, *_ = candidates({"evicted_from_both": 500}, 1000, small)
    assert larger.setup.engine_args == ["--kv-offloading-size", "1"]
    assert larger.place < largest.place, "of equal gains the smaller one is listed first"


def test_windows_that_are_not_stored_are_tried_with_a_retention_interval_also_with_the_core() -> None:
    tried = changes({"window_not_stored": 500}, at("--kv-offloading-size", "0.5"))
    assert tried[0] == "--prefix-cache-retention-interval 0 -> 512"


def test_what_is_never_stored_is_tried_with_answers_and_without_a_threshold() -> None:
    extra = {"kv_connector_extra_config": {"store_threshold": 2}}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", **extra}
    where = at("--kv-offloading-size", "0.5", "--kv-transfer-config", json.dumps(transfer))
    first, second, *_ = candidates({"never_stored": 500}, 1000, where)
    assert "store_threshold 0" in first.change and "offload_prompt_only false" in second.change
    kept = json.loads(second.setup.engine_args[-1])["kv_connector_extra_config"]
    assert kept == {"store_threshold": 2, "offload_prompt_only": False}


def test_evictions_are_tried_with_a_tier_where_there_is_none() -> None:
    """Where evictions dominate, host memory of several pools may win most, so it is tried first."""
    tried = changes({"evicted": 500}, at(pool_gib=0.25))
    assert tried[0] == "--kv-offloading-size 1, host memory of 4x the pool"
    assert not any("offloading" in one for one in changes({"evicted": 500}, at("--kv-offloading-size", "3")))


def simulated(*flags: str) -> Run:
    engine = [*FLAGS, "--num-gpu-blocks-override", "60", *flags]
    return simulate(
        build(ROUNDS), Setup(model="tiny-llama", engine_args=engine, device=Simulated(copy=INSTANT))
    )


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_causes_add_up_and_a_larger_tier_wins_what_a_small_one_lost() -> None:
    explanation = explain(simulated("--kv-offloading-size", "0.002"))
    assert (
        explanation.prefix_cache.misses["evicted_from_both"] == 12 * 672
        and explanation.prefix_cache.hit_tokens == 0
    )
    assert sum(explanation.prefix_cache.misses.values()) == explanation.prefix_cache.missed
    assert not explanation.disagreements
    assert any("--kv-offloading-size" in one.change and one.gain_tokens > 0 for one in explanation.remedies)
    printed = " ".join(" ".join(document_lines(document(explanation, "a.kvrun"))).split())
    assert "evicted_from_both" in printed and "stored in host memory, and evicted there and" in printed
    whole = explain(simulated("--kv-offloading-size", "0.1"), tries=0)
    assert whole.tier_hit_tokens == whole.prefix_cache.hit_tokens == 12 * 672
    assert "of host memory" in "\n".join(document_lines(document(whole, "a.kvrun")))


def test_copies_are_replayed_at_the_runs_own_pace() -> None:
    run = with_tier([0], [0])
    assert (
        Setup.of_run(run).simulated.copy == INSTANT
    )  # a CPU engine's copies are done when they are submitted
    gpu = replace(run, header=msgspec.structs.replace(run.header, engine=replace_device(run, "cuda")))
    copy = Setup.of_run(gpu).simulated.copy
    assert copy.store_gib_s == pytest.approx(800 / 2e-3 / (1 << 30))
    assert copy.load_gib_s == pytest.approx(400 / 1e-3 / (1 << 30))


def replace_device(run: Run, device: str) -> EngineInfo:
    return msgspec.structs.replace(run.header.engine, device=device)
