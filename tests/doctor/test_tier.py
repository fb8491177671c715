"""What doctor says of a tier of host memory: what it holds by group, and when it gives nothing back."""

from __future__ import annotations

import msgspec
import pytest

from kvtune.doctor.ask_vllm import ask_vllm
from kvtune.doctor.facts import Facts, Group
from kvtune.doctor.rules import settings_findings
from kvtune.doctor.tier import tier_lines, tier_of
from kvtune.sim.settings import SimSettings
from kvtune.sim.simulators import simulate
from kvtune.workload.spec import build
from tests.choice import first_of

FULL = Group(kind="full attention", layers=4, block_tokens=32, page_bytes=8192, used_bytes=8192)
WINDOW = Group(kind="sliding window", layers=2, block_tokens=32, page_bytes=8192, used_bytes=8192, window=512)


def facts(gib: float, *groups: Group, pool_blocks: int = 0, retention: int | None = None) -> Facts:
    return Facts(
        source="vllm",
        model="m",
        given={"kv-offloading-size": str(gib)},
        max_model_len=1024,
        block_tokens=32,
        default_block_tokens=32,
        hit_tokens=32,
        groups=list(groups),
        group_layers=4,
        pool_blocks=pool_blocks,
        tokens_fit=1 << 20,
        retention=retention,
    )


def findings(of: Facts) -> list[str]:
    return [
        f"{one.level}: {one.text} {one.hint}" for one in settings_findings(of) if one.topic == "host memory"
    ]


def test_a_tier_holds_chunks_of_a_pools_block_and_says_what_a_group_leaves_empty() -> None:
    """A chunk is 32 KiB. A prompt of 1,024 tokens needs 32 of full attention, and 16 for its last window."""
    tier = tier_of(facts(1, FULL, WINDOW))
    assert tier is not None
    assert (tier.chunks, tier.chunk_bytes, tier.prompts) == (32768, 32 << 10, 32768 // 48)
    told = "\n".join(value for _, value in tier_lines(facts(1, FULL, WINDOW, pool_blocks=4096)))
    assert "32,768 chunks of 32 KiB, 8x the pool" in told and "room for 682 prompts" in told
    assert "full attention: 32 tokens a chunk, 0.0 % padding" in told
    assert "sliding window of 512: 32 tokens a chunk, 50.0 % padding" in told
    assert list(tier_lines(Facts(source="vllm", model="m"))) == []


def test_a_tier_as_large_as_the_pool_gives_nothing_back() -> None:
    (said,) = findings(facts(1, FULL, pool_blocks=32768))
    assert said.startswith("warning") and "--kv-offloading-size 4 is 4x the pool" in said
    assert "bounds -w LOAD --tier" in said
    assert findings(facts(4, FULL, pool_blocks=32768)) == []
    reuse = '{"kv_connector_extra_config":{"eviction_policy":"kvtune"}}'  # stores less than what is computed
    given = {"kv-offloading-size": "1", "kv-transfer-config": reuse}
    assert findings(msgspec.structs.replace(facts(1, FULL, pool_blocks=32768), given=given)) == []


def test_windows_with_the_default_retention_are_hardly_stored() -> None:
    (said,) = findings(facts(4, FULL, WINDOW, pool_blocks=32768, retention=0))
    assert "windows are stored at the end of a prompt only" in said
    assert "--prefix-cache-retention-interval 512, or the eviction policy kvtune" in said
    assert findings(facts(4, FULL, WINDOW, pool_blocks=32768, retention=512)) == []
    reuse = '{"kv_connector_extra_config":{"eviction_policy":"kvtune"}}'  # stores windows of its own choice
    given = {"kv-offloading-size": "4", "kv-transfer-config": reuse}
    assert findings(msgspec.structs.replace(facts(4, FULL, WINDOW, retention=0), given=given)) == []


def test_less_than_a_chunk_is_an_error() -> None:
    (said,) = findings(facts(0.00001, FULL, pool_blocks=10))
    assert said.startswith("error") and "less than a chunk of 32 KiB" in said


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "flags"),
    first_of(
        [
            ("tiny-gemma3", ["--block-size", "32", "--num-gpu-blocks-override", "300"]),
            ("tiny-qwen3next", ["--num-gpu-blocks-override", "40"]),
        ]
    ),
)
def test_the_chunks_are_those_that_vllm_makes(model: str, flags: list[str]) -> None:
    given = [*flags, "--max-model-len", "1000", "--kv-offloading-size", "0.05"]
    tier = tier_of(ask_vllm(model, given))
    run = simulate(build("decode:requests=1,prompt=8,output=2"), SimSettings(model=model, engine_args=given))
    assert tier is not None
    assert tier.chunks == run.header.engine.settings["offload"]["chunks"] > 100
