"""The table of changes: each with its price, or why it does nothing here; and what the load says of their values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtune.answers.changes import Change, Situation, changes, tail_tokens
from kvtune.data.knobs import KNOBS
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.spec import build

MTP = ["--speculative-config", '{"method":"mtp","num_speculative_tokens":2}']


def engine(*flags: str, block: int = 544, chunk: int = 8192, sequences: int = 256) -> Situation:
    chosen, sizes = Setup(model="m", engine_args=list(flags)), {"block": block, "unit": block}
    steps = {"chunk": chunk, "sequences": sequences}
    return Situation(chosen, blocks=100, retention=0, window=0, states=True, pool_gib=1.0, **sizes, **steps)


def by_setting(here: Situation) -> dict[str, Change]:
    return {name: change for change in changes(here) if change.kept is not None for name in change.settings}


@pytest.mark.parametrize(
    "flags", [[], MTP, ["--prefix-match-unit", "16"], [*MTP, "--prefix-match-unit", "16"]]
)
def test_each_setting_is_offered_with_a_price_or_refused_with_why(flags: list[str]) -> None:
    found = by_setting(engine(*flags))
    assert {"mamba_cache_mode", "mamba_block_size", "enable_mamba_shared_prefix_checkpoint"} < found.keys()
    for change in found.values():
        assert bool(change.why_not) or (change.cost and change.kept), change
        assert all(name in KNOBS for name in change.settings)
    assert "align" in found["mamba_cache_mode"].why_not and "544" in found["mamba_block_size"].why_not
    assert bool(found["enable_mamba_shared_prefix_checkpoint"].why_not) == (
        "--speculative-config" not in flags
    )


@pytest.mark.parametrize(
    ("block", "chunk", "sequences"), [(16, 8192, 1024), (544, 2048, 64), (2096, 8192, 256)]
)
def test_an_interval_is_whole_blocks_and_a_chunk_that_a_server_can_serve_with(
    block: int, chunk: int, sequences: int
) -> None:
    at = engine(block=block, chunk=chunk, sequences=sequences)
    interval = at.least_interval
    kept = f"every {interval:,} tokens, and at the ends of prompts"
    every = next(change for change in changes(at) if change.kept == kept)
    assert (
        interval % block == 0
        and interval >= max(sequences, chunk // 8)
        and interval - block < max(block, sequences, chunk // 8)
    )
    assert every.setup.engine_args == [
        "--prefix-cache-retention-interval",
        str(interval),
        "--max-num-batched-tokens",
        str(interval),
    ]


@pytest.mark.parametrize(("tail", "offered"), [(64, "--set core.slack=64"), (1000, "")])
def test_a_core_that_keeps_states_is_offered_the_slack_of_the_load(tail: int, offered: str) -> None:
    """Where prompts part 1,000 tokens before an end, blocks of 544 tokens have it with the slack of 600, too."""
    setup = Setup(model="m", core="kvtune", core_settings={"keep_states": True, "slack": 600})
    here = replace(engine(), setup=setup, tail=tail)
    (change,) = (each for each in changes(here) if "slack" in each.settings)
    assert change.kept and change.cost and bool(change.why_not) == (not offered)
    assert not offered or (change.change == offered and change.setup.core_settings["slack"] == tail)
    unknown = [each.why_not for each in changes(replace(here, tail=0)) if "slack" in each.settings]
    assert set(unknown) == {"the engine keeps states so"}


def test_a_block_that_no_finer_unit_divides_has_no_finer_hits() -> None:
    at = engine(block=16)
    assert at.fine_unit == 0
    assert "no multiple of 16" in by_setting(at)["prefix_match_unit"].why_not


def test_drafts_change_the_blocks_and_the_pool_keeps_its_bytes() -> None:
    at = engine(*MTP, "--num-gpu-blocks-override", "100")
    off = by_setting(at)["num_speculative_tokens"].setup.engine_args
    assert off == ["--kv-cache-memory-bytes", str(1 << 30)]
    sized = engine(*MTP, "--kv-cache-memory-bytes", "5000")
    assert by_setting(sized)["num_speculative_tokens"].setup.engine_args == [
        "--kv-cache-memory-bytes",
        "5000",
    ]


@pytest.mark.parametrize(
    ("spec", "tail"),
    [
        ("rounds:prefixes=3,prefix=2000,suffix=64,output=1,rounds=3", 64),
        ("rounds:prefixes=3,prefix=10,suffix=64,output=1,rounds=3", 0),
        ("rounds:prefixes=3,prefix=2000,suffix=0,output=1,rounds=3", 0),
        ("prefill:requests=3,prompt=2000,output=2", 0),
    ],
)
def test_a_load_tells_how_far_before_an_end_its_prompts_part(spec: str, tail: int) -> None:
    assert tail_tokens(build(spec), 128) == tail
