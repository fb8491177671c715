"""Replays of engines with a tier of host memory behind the KV cache."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from msgspec.structs import replace

from kvtune.base.errors import KvtuneError
from kvtune.data.run.types import Run
from kvtune.lab.device.cost import INSTANT, CopyTime
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.simulators import Simulators
from kvtune.reading.analysis.offload import offload
from kvtune.requests.loads.spec import build
from tests.choice import each_value
from tests.simulator import on

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

FLAGS = [
    "--block-size",
    "32",
    "--max-model-len",
    "1000",
    "--max-num-batched-tokens",
    "512",
    "--max-num-seqs",
    "16",
]
TIER = ["--kv-offloading-size", "0.1"]
ARC = ["--kv-transfer-config", '{"kv_connector_extra_config":{"eviction_policy":"arc","store_threshold":2}}']
"""vLLM's other eviction policy, and what is offered twice."""
ROUNDS = "rounds:prefixes=6,prefix=700,suffix=40,output=8,rounds=3"


def replayed(simulators: Simulators, work: str, settings: list[Setup]) -> list[Run]:
    runs: dict[int, Run] = {}
    for number, outcome in simulators.run(on(build(work), settings)):
        if isinstance(outcome, KvtuneError):
            raise outcome
        runs[number] = outcome
    return [runs[number] for number in range(len(settings))]


def engine(blocks: int, *flags: str) -> Setup:
    arguments = [*FLAGS, "--num-gpu-blocks-override", str(blocks), *flags]
    return Setup(model="tiny-llama", engine_args=arguments)


def hits(run: Run) -> int:
    return int(run.table("requests")["hit_tokens"].sum())


def test_what_the_pool_has_no_room_for_comes_back_from_the_tier_and_takes_time(
    simulators: Simulators,
) -> None:
    slow_copies = CopyTime(store_gib_s=0.01, load_gib_s=0.01, latency_s=0.001)
    tier = engine(60, *TIER)
    without, instant, slow = replayed(
        simulators, ROUNDS, [engine(60), tier.replayed(copy=INSTANT), tier.replayed(copy=slow_copies)]
    )
    assert hits(without) == 0
    assert hits(instant) == hits(slow) == 2 * 6 * 672
    assert instant.header.wall_s < without.header.wall_s
    assert instant.header.wall_s < slow.header.wall_s


@pytest.mark.full
def test_a_replay_is_the_same_whatever_order_pythons_sets_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that end in the same step offer the tier their chunks in such an order, and it is too small for all."""
    work = "zipf:prefixes=40,prefix=256,suffix=32,requests=300,output=8,concurrency=16"
    tier = engine(120, "--kv-offloading-size", "0.002")
    found = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        with Simulators(2) as both:
            ours = replace(tier, engine_args=[*tier.engine_args, *ARC], core="kvtune")
            found.append([(hits(run), run.header.wall_s) for run in replayed(both, work, [tier, ours])])
    assert found[0] == found[1] and all(hit for hit, _ in found[0])


def test_a_run_says_what_each_tier_hit_and_what_was_copied(simulators: Simulators) -> None:
    """Six prompts of 740 tokens a round, of which a block of 32 is a chunk of the tier; the pool keeps none of them."""
    slow_copies = CopyTime(store_gib_s=0.01, load_gib_s=0.01)
    without, run = replayed(simulators, ROUNDS, [engine(60), engine(60, *TIER).replayed(copy=slow_copies)])
    assert offload(without) is None and "copies" not in without.tables
    tier = offload(run)
    assert tier is not None and tier.copies is not None
    assert (tier.pool_hit_tokens, tier.tier_hit_tokens) == (0, 2 * 6 * 672) == (0, hits(run))
    assert tier.computed_tokens == tier.prompt_tokens - tier.tier_hit_tokens
    copies = tier.copies
    chunk_bytes = copies.stored_bytes // copies.stored_chunks
    assert (
        copies.stored_chunks == 6 * 23 + 2 * 6 * 2
    )  # the suffix ends in the 24th block and is new in each round
    assert copies.loads == 12 and copies.loaded_bytes == 12 * 21 * chunk_bytes
    assert copies.unread_chunks == copies.stored_chunks - 6 * 21
    assert copies.load_s == pytest.approx(copies.loaded_bytes / (0.01 * (1 << 30)))
    assert copies.wait_s >= copies.load_s and copies.refused == 0
    assert tier.tier_bytes == int(0.1 * (1 << 30)) and tier.policy == "lru"


def test_the_ranks_of_an_engine_copy_their_shares_at_the_same_time(simulators: Simulators) -> None:
    settings = [engine(60, *TIER, *flags) for flags in ([], ["--tensor-parallel-size", "2"])]
    one, two = (offload(run) for run in replayed(simulators, ROUNDS, settings))
    assert one is not None and one.copies is not None and two is not None and two.copies is not None
    assert one.tier_hit_tokens == two.tier_hit_tokens == 2 * 6 * 672
    assert one.copies.loaded_bytes == two.copies.loaded_bytes and two.copies.refused == 0
    assert one.tier_chunks == two.tier_chunks


def test_a_tier_that_is_too_small_says_what_it_evicted_and_what_found_no_room(
    simulators: Simulators,
) -> None:
    (run,) = replayed(
        simulators, ROUNDS, [engine(60, "--kv-offloading-size", "0.002").replayed(copy=INSTANT)]
    )
    tier = offload(run)
    assert tier is not None and tier.copies is not None
    assert tier.tier_chunks < 6 * 23 and tier.tier_hit_tokens == 0
    assert tier.copies.evicted_chunks > 0 and tier.copies.unread_chunks == tier.copies.stored_chunks


def test_decode_steps_between_copies_are_made_at_once(simulators: Simulators) -> None:
    """As engines on GPUs, with asynchronous scheduling: vLLM then frees blocks only when their last step is done."""
    work = "chat:sessions=6,turns=3,system=64,first=200,user=40,output=60"
    settings = engine(48, "--kv-offloading-size", "0.004").replayed(async_scheduling=True)
    at_once, single = replayed(simulators, work, [settings, settings.replayed(shortcuts=False)])
    for table in ("requests", "steps", "copies"):
        for name, column in single.table(table).items():
            np.testing.assert_array_equal(at_once.table(table)[name], column, name)
    assert offload(at_once) == offload(single) and hits(single)
    assert at_once.header.extra.sim is not None
    assert at_once.header.extra.sim.jumped_steps > 50


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("load", "side", "copy"),
    each_value(
        [
            ("tiny-llama", "zipf:prefixes=6,prefix=500,suffix=40,requests=40,concurrency=8,output=60", 70),
            ("tiny-llama", "chat:sessions=6,turns=3,system=64,first=200,user=40,output=60", 48),
            ("tiny-gemma3", "zipf:prefixes=8,prefix=500,suffix=40,requests=30,concurrency=6,output=60", 170),
            ("tiny-qwen3next", "chat:sessions=6,turns=3,system=64,first=200,user=40,output=60", 48),
        ],
        [("stock", []), ("kvtune", []), ("stock", ARC)],
        [CopyTime(store_gib_s=0.02, load_gib_s=0.02), CopyTime()],
    ),
)
def test_steps_in_bulk_are_the_single_steps_with_a_tier_too(
    simulators: Simulators,
    load: tuple[str, str, int],
    side: tuple[Literal["stock", "kvtune"], list[str]],
    copy: CopyTime,
    asynchronous: bool,
) -> None:
    (model, work, blocks), (core, policy) = load, side
    retention = ["--prefix-cache-retention-interval", "512"] if model == "tiny-gemma3" else []
    small = ["--kv-offloading-size", "0.004"]  # evicts
    settings = replace(engine(blocks, *small, *retention, *policy), model=model, core=core)
    settings = settings.replayed(copy=copy, digests=True, async_scheduling=asynchronous)
    single = replace(settings, core_settings={"steady": False} if core == "kvtune" else {})
    single = single.replayed(shortcuts=False)
    short, plain = replayed(simulators, work, [settings, single])
    assert short.header.extra.digests == plain.header.extra.digests
    for name in ("hit_tokens", "tier_hit_tokens", "finished_s", "preemptions"):
        assert np.array_equal(short.table("requests")[name], plain.table("requests")[name]), name
    assert short.header.extra.sim is not None and short.header.extra.sim.jumps > 0


def test_a_connector_that_is_not_known_is_refused_by_name(simulators: Simulators) -> None:
    other = '{"kv_connector":"SimpleCPUOffloadConnector","kv_role":"kv_both"}'
    with pytest.raises(KvtuneError, match="SimpleCPUOffloadConnector") as refused:
        replayed(simulators, ROUNDS, [engine(60, "--kv-transfer-config", other)])
    assert refused.value.exit_code == 2
