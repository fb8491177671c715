"""Why a tier of host memory did not have what a prompt missed: on replays through vLLM's own connector."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, Literal

import pytest

from kvtune.base.errors import KvtuneError
from kvtune.data.causes import OF_TIER
from kvtune.data.run.types import Run
from kvtune.lab.device.cost import INSTANT, CopyTime
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from kvtune.lab.sim.verdicts.causes import split
from kvtune.lab.sim.verdicts.observer import verdicts_of
from kvtune.lab.sim.verdicts.tier import TierMemory
from kvtune.requests.loads.spec import build
from tests.simulator import on

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

LENGTH = ["--max-model-len", "1000", "--max-num-batched-tokens", "512", "--max-num-seqs", "8"]
LLAMA = ("tiny-llama", ["--block-size", "32", "--num-gpu-blocks-override", "60"])
GEMMA = ("tiny-gemma3", ["--block-size", "32", "--num-gpu-blocks-override", "150"])
ROOM = ("--kv-offloading-size", "0.1")
SMALL = ("--kv-offloading-size", "0.002")
WINDOWS = ("--prefix-cache-retention-interval", "512")
ROUNDS = "rounds:prefixes=6,prefix=700,suffix=40,output=8,rounds=3"
SLOW_STORES = CopyTime(store_gib_s=0.0005, load_gib_s=1.0)


def causes(
    simulators: Simulators,
    work: str,
    engine: tuple[str, list[str]],
    *more: str,
    core: Literal["stock", "kvtune"] = "stock",
    copy: CopyTime = INSTANT,
) -> Counter[str]:
    """Missed tokens by cause, and hits of the tier. Every prompt adds up, and listening changes no hit."""
    model, flags = engine
    alone = Setup(model=model, engine_args=[*LENGTH, *flags, *more], core=core, device=Simulated(copy=copy))
    runs: dict[int, Run] = {}
    for number, outcome in simulators.run(on(build(work), [alone, alone.replayed(verdicts=True)])):
        if isinstance(outcome, KvtuneError):
            raise outcome
        runs[number] = outcome
    table = runs[1].table("requests")
    assert runs[0].table("requests")["hit_tokens"].tolist() == table["hit_tokens"].tolist()
    total: Counter[str] = Counter(of_tier=int(table["tier_hit_tokens"].sum()))
    for hit, verdict in zip(table["hit_tokens"].tolist(), verdicts_of(runs[1]), strict=True):
        assert verdict is not None and verdict.boundaries.hit == hit
        counts = split(verdict.boundaries).misses
        assert min(counts.values()) >= 0 and hit + sum(counts.values()) == verdict.boundaries.prompt
        assert verdict.lagging or not verdict.boundaries.tier_cause
        total.update(counts)
    return total


def named(counts: Counter[str]) -> set[str]:
    return {cause for cause in (*OF_TIER, "evicted", "lagging_group") if counts[cause]}


def test_with_room_for_all_nothing_is_lost(simulators: Simulators) -> None:
    counts = causes(simulators, ROUNDS, LLAMA, *ROOM)
    assert named(counts) == set() and counts["of_tier"] == 12 * 672


@pytest.mark.full
def test_what_both_evicted_is_said_of_both(simulators: Simulators) -> None:
    counts = causes(simulators, ROUNDS, LLAMA, *SMALL)
    assert named(counts) == {"evicted_from_both"} and counts["evicted_from_both"] == 12 * 672


@pytest.mark.full
def test_answers_are_never_stored(simulators: Simulators) -> None:
    """A second turn repeats the first one's answer, which the pool has lost and the tier was never given."""
    counts = causes(
        simulators, "chat:sessions=6,turns=2,system=32,first=288,user=40,output=200", LLAMA, *ROOM
    )
    assert named(counts) == {"never_stored"} and counts["of_tier"] > 0


@pytest.mark.full
def test_a_window_that_vllm_does_not_store_is_said_to_be_one(simulators: Simulators) -> None:
    """The core keeps the windows of shared prefixes in its pool; vLLM stores those at prompts' ends alone."""
    lost = causes(simulators, ROUNDS, GEMMA, *ROOM, core="kvtune")
    kept = causes(simulators, ROUNDS, GEMMA, *ROOM, *WINDOWS, core="kvtune")
    assert named(lost) == {"window_not_stored"}
    assert kept["of_tier"] > lost["of_tier"] and not kept["window_not_stored"]


@pytest.mark.full
def test_a_store_that_found_no_room_is_refused(simulators: Simulators) -> None:
    load = "zipf:prefixes=6,prefix=500,suffix=40,requests=40,concurrency=8,output=60"
    counts = causes(simulators, load, LLAMA, "--kv-offloading-size", "0.0005", copy=SLOW_STORES)
    assert counts["store_refused"] > 0


def test_while_the_request_that_found_no_room_still_runs_its_store_is_late() -> None:
    """A running request offers it again; in this time only windows that it left behind can be missed."""
    running = SimpleNamespace(req=SimpleNamespace(is_finished=lambda: False))
    side: Any = SimpleNamespace(
        manager=SimpleNamespace(prepare_store=lambda keys, context: None),
        config=SimpleNamespace(
            kv_group_configs=[
                SimpleNamespace(group_idx=0, tokens_per_chunk=16, sliding_window_size_in_chunks=2)
            ],
            tokens_per_hash=16,
        ),
        _req_status={"7": running},
    )
    group: Any = SimpleNamespace(ids=[0], label="sliding window 32", needed_ends=lambda boundary: [16, 32])
    tier = TierMemory(side)
    pytest.importorskip("vllm")
    assert tier.cause([group], [b"a" * 8, b"b" * 8], 0, 32) == ("window_not_stored", "sliding window 32")
    key = b"a" * 8 + (0).to_bytes(4, "big")
    side.manager.prepare_store([key], SimpleNamespace(req_id="7"))
    assert tier.cause([group], [b"a" * 8, b"b" * 8], 0, 32)[0] == "stored_late"
    del side._req_status["7"]
    assert tier.cause([group], [b"a" * 8, b"b" * 8], 0, 32)[0] == "store_refused"
    assert tier.cause([group], [b"a" * 8, b"b" * 8], 32, 32) == ("", "")
