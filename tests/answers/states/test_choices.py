"""What flags can keep of states: each choice with its price, or why it does nothing here."""

from __future__ import annotations

import pytest

from kvtune.answers.states.choices import Choice, Engine, at_interval, choices
from kvtune.data.knobs import KNOBS
from kvtune.lab.setup.setup import Setup

MTP = ["--speculative-config", '{"method":"mtp","num_speculative_tokens":2}']


def engine(*flags: str, block: int = 544, chunk: int = 8192, sequences: int = 256) -> Engine:
    return Engine(Setup(model="m", engine_args=list(flags)), block, block, chunk, sequences, 1 << 30)


def by_setting(at: Engine) -> dict[str, Choice]:
    return {name: choice for choice in choices(at) for name in choice.settings}


@pytest.mark.parametrize(
    "flags", [[], MTP, ["--prefix-match-unit", "16"], [*MTP, "--prefix-match-unit", "16"]]
)
def test_each_setting_is_offered_with_a_price_or_refused_with_why(flags: list[str]) -> None:
    found = by_setting(engine(*flags))
    assert {"mamba_cache_mode", "mamba_block_size", "enable_mamba_shared_prefix_checkpoint"} < found.keys()
    for choice in found.values():
        assert bool(choice.why_not) or (choice.price and choice.kept), choice
        assert all(name in KNOBS for name in choice.settings)
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
    assert (
        interval % block == 0
        and interval >= max(sequences, chunk // 8)
        and interval - block < max(block, sequences, chunk // 8)
    )
    flags = at_interval(at, interval).of(at).engine_args
    assert flags == [
        "--prefix-cache-retention-interval",
        str(interval),
        "--max-num-batched-tokens",
        str(interval),
    ]


def test_a_block_that_no_finer_unit_divides_has_no_finer_hits() -> None:
    at = engine(block=16)
    assert at.fine_unit == 0
    assert "no multiple of 16" in by_setting(at)["prefix_match_unit"].why_not


def test_drafts_change_the_blocks_and_the_pool_keeps_its_bytes() -> None:
    at = engine(*MTP, "--num-gpu-blocks-override", "100")
    off = by_setting(at)["num_speculative_tokens"].of(at).engine_args
    assert off == ["--kv-cache-memory-bytes", str(1 << 30)]
    sized = engine(*MTP, "--kv-cache-memory-bytes", "5000")
    assert by_setting(sized)["num_speculative_tokens"].of(sized).engine_args == [
        "--kv-cache-memory-bytes",
        "5000",
    ]
