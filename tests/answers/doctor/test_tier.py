"""A tier of host memory before it is bought: doctor's arithmetic against what public reports measured."""

from __future__ import annotations

from itertools import product
from typing import Any

import msgspec
import pytest

from kvtune.answers.doctor.asked import Asked, asked_of, with_tier
from kvtune.answers.doctor.diagnosis import diagnosed
from kvtune.answers.doctor.document import document
from kvtune.answers.doctor.facts import Facts, Group
from kvtune.answers.doctor.model import ModelReport
from kvtune.answers.doctor.planned import read_config
from kvtune.answers.doctor.tier import Rules, Tier, tier_findings, tier_of
from kvtune.base.errors import UsageError
from kvtune.data.platforms import device
from kvtune.data.show.markdown import markdown
from kvtune.lab.device.cost import StepCost

GIB, BLOCK = 1 << 30, 1 << 16
H200 = device("h200")


def of_config(model: str, *flags: str) -> ModelReport:
    return ModelReport.of(read_config(model, list(flags), H200))


def group(
    kind: Any, block_tokens: int, page_bytes: int, window: int = 0, layers: int = 1, **more: Any
) -> Group:
    sizes = {"block_tokens": block_tokens, "page_bytes": page_bytes, "used_bytes": page_bytes}
    return Group(kind=kind, layers=layers, window=window, **sizes, **more)


def made(*groups: Group, block_bytes: int, **more: Any) -> ModelReport:
    """A report on a model with these groups."""
    given = {"retention": 0, "device": "cuda", "max_model_len": 40_000, **more}
    layers = max(each.layers for each in groups)
    facts = Facts(source="vllm", model="m", groups=list(groups), group_layers=layers, **given)
    return ModelReport.of(msgspec.structs.replace(facts, pool_block_bytes=block_bytes))


def bought(report: ModelReport, size_bytes: int) -> Tier:
    return tier_of(report, report.block_bytes, size_bytes)


def test_a_measured_load_of_qwens_hybrid_is_predicted_to_the_byte() -> None:
    """vllm-project/recipes#889, one H200: 156,800 tokens came back in 10,429,988,864 bytes, in blocks of 784."""
    report = of_config("qwen3.5-27b")
    assert report.block_tokens == 784 and report.state_bytes % 48 == 0
    assert Rules.of(report).load_bytes(156_800) == 10_429_988_864


@pytest.mark.parametrize(("gib", "measured"), [(200, 385.0), (400, 769.0)])
def test_a_tensor_over_a_power_of_two_pins_nearly_twice_of_what_was_asked(gib: int, measured: float) -> None:
    """vllm#53042: 24 tensors of 2,053 rows of 1,089,536 bytes on each of 4 ranks; 0.32 maps no more than asked."""
    groups = [group(kind, 16, 1_089_536, layers=24) for kind in ("full attention", "state", "state", "state")]
    report = made(*groups, block_bytes=24 * 1_089_536, given={"tensor-parallel-size": "4"})
    tier = bought(report, gib * GIB)
    assert tier.blocks == {200: 2053, 400: 4106}[gib]
    assert tier.rounded_bytes / GIB == pytest.approx(measured, rel=0.003)
    assert 0.999 * gib * GIB < tier.mapped_bytes <= gib * GIB


def test_500_gib_that_loaded_nothing_held_less_than_the_pool() -> None:
    """vllm#56871, DeepSeek V4.1 on 8 ranks: each block of a group took the bytes of all eight groups, on each rank."""
    windows = [group("sliding window", 32, 19_008, 128, layers=6) for _ in range(7)]
    ring = group("ring buffer", 8, 32_768, layers=3, cached=False)
    groups = (*windows, group("full attention", 64, 14_616, layers=8), ring)
    given = {"tensor-parallel-size": "8"}
    more = {"retention": 4096, "pool_blocks": 758_317, "given": given}
    then = bought(made(*groups, block_bytes=8 * 116_928, **more), 500 * GIB)
    assert then.blocks < 758_317 // 10
    warning = next(tier_findings(then, 758_317))
    assert warning.level == "warning" and "71,7" in warning.text and "no more than the pool" in warning.text
    latent = [msgspec.structs.replace(each, specs=["SlidingWindowMLASpec"]) for each in groups]
    now = bought(made(*latent, block_bytes=116_928, **more), 500 * GIB)
    assert now.blocks > 60 * then.blocks and not list(tier_findings(now, 758_317))


def test_a_tier_no_larger_than_the_pool_is_said_to_repeat_it() -> None:
    """vllm#43946: the tier is a superset of what was computed last, so what fits the pool is found there."""
    report = of_config("llama-3.1-8b")
    blocks = 40 * GIB // report.block_bytes
    for pool, levels in ((4 * blocks, ["warning"]), (blocks, ["warning"]), (blocks - 1, []), (0, [])):
        assert [each.level for each in tier_findings(bought(report, 40 * GIB), pool)] == levels


def test_a_conversation_of_three_kinds_of_groups_takes_the_chunks_that_vllms_metric_counts() -> None:
    """vllm#53902: 36,864 tokens in blocks of 256 with one window of 1,024 and one state are 149 chunks."""
    groups = (
        group("full attention", 256, BLOCK),
        group("sliding window", 256, BLOCK, 1024),
        group("state", 256, BLOCK),
    )
    rules = Rules.of(made(*groups, block_bytes=BLOCK))
    assert [len(rules.stored(each, 36_864)) for each in rules.groups] == [144, 4, 1]


def test_40_gib_of_kimis_latent_tokens_are_one_division() -> None:
    """ROCm/ATOM#2268: "40 GiB / 56,448 B/tok", on each rank."""
    report = made(group("full attention", 64, 64 * 56_448), block_bytes=64 * 56_448)
    prompt = bought(report, 40 * GIB).prompts[0]
    assert 0 <= 40 * GIB // 56_448 - prompt.fit * prompt.tokens < prompt.tokens


@pytest.mark.parametrize(("block", "tokens"), list(product((16, BLOCK), (1000, 1024, 1025, 4096))))
def test_what_loads_ends_where_every_group_has_something_stored(block: int, tokens: int) -> None:
    full, state = group("full attention", block, BLOCK), group("state", block, BLOCK)
    window = group("sliding window", block, BLOCK, 8 * block)
    for groups, again in (
        ((full,), tokens // block * block),
        ((full, window), (tokens - 1) // block * block),
        ((window, state, full), (tokens - 1) // block * block),
    ):
        rules = Rules.of(made(*groups, block_bytes=BLOCK))
        assert rules.loaded(tokens, tokens, tokens) == again
        longer = tokens + 20 * block
        assert rules.loaded(longer, tokens, longer) == (again if len(groups) == 1 else 0)
        if len(groups) == 2:
            every = Rules.of(made(*groups, block_bytes=BLOCK, retention=16 * block))
            assert every.loaded(longer, tokens, longer) == tokens // block // 16 * 16 * block


def test_a_window_of_a_block_and_a_token_more_never_loads() -> None:
    """The store keeps ceil((window - 1) / block) blocks, the lookup wants ceil(window / block)."""
    groups = group("full attention", 16, BLOCK), group("sliding window", 16, BLOCK, 129)
    tier = bought(made(*groups, block_bytes=BLOCK), GIB)
    assert [prompt.again for prompt in tier.prompts] == [0, 0]
    assert "none loads" in " ".join(each.text for each in tier_findings(tier, 0))
    nearly = groups[0], msgspec.structs.replace(groups[1], window=128)
    assert bought(made(*nearly, block_bytes=BLOCK), GIB).prompts[0].again == 4080


def test_latent_attention_is_kept_once_for_all_ranks_but_not_over_stages() -> None:
    report = made(group("full attention", 64, 64 * 1152, specs=["MLAAttentionSpec"]), block_bytes=64 * 1152)
    blocks = {}
    for flags in (
        {},
        {"tensor-parallel-size": "8"},
        {"tensor-parallel-size": "4", "pipeline-parallel-size": "2"},
    ):
        blocks[len(flags)] = bought(msgspec.structs.replace(report, given=flags), GIB).blocks
    assert blocks[0] == blocks[1] > 7 * blocks[2]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"groups": [group("chunked attention", 16, BLOCK, 128)]}, "chunked attention groups"),
        ({"match_unit": 32}, "--prefix-match-unit"),
        ({"given": {"decode-context-parallel-size": "2"}}, "decode-context-parallel-size"),
        ({"retention": 100}, "vLLM refuses --prefix-cache-retention-interval 100"),
    ],
)
def test_what_is_not_known_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    report = made(
        group("full attention", 16, BLOCK), group("sliding window", 16, BLOCK, 128), block_bytes=BLOCK
    )
    with pytest.raises(UsageError, match=named):
        bought(msgspec.structs.replace(report, **change), GIB)


def test_a_launch_lines_tier_is_taken_out_of_its_flags_and_read() -> None:
    flags = "--kv-offloading-size 500 --max-model-len 32768 --tensor-parallel-size 2"
    line = [f"vllm serve Qwen/Qwen3-8B {flags}"]
    asked = with_tier(asked_of(None, line, None, H200), "")
    assert asked.tier == 500 * GIB and "--kv-offloading-size" not in asked.flags and "2" in asked.flags
    assert with_tier(asked_of(None, line, None, H200), "1.5GiB").tier == 3 * GIB // 2
    settings = '{"kv_connector_extra_config": {"store_threshold": 2}}'
    odd = with_tier(Asked("m", ["--kv-offloading-size", "4", "--kv-transfer-config", settings]), "")
    assert odd.tier == 0 and "store_threshold" in odd.findings[-1].text
    for wrong in ("500", "GiB", "0x5GiB", "-1GiB", "five"):
        if wrong != "500":
            with pytest.raises(UsageError, match="no size of host memory"):
                with_tier(Asked("m"), wrong)


def test_the_section_says_what_is_stored_of_each_kind_of_group_and_what_is_assumed() -> None:
    report = of_config("qwen3.5-27b", "--prefix-cache-retention-interval", "0")
    tier = bought(report, 500 * GIB)
    text = markdown(document(diagnosed((), (), msgspec.structs.replace(report, tier=tier))))
    for words in (
        "one state where a prompt ends",
        "none of its answer",
        "25 GiB/s",
        "assumed",
        "unknown for such blocks",
    ):
        assert words in text
    assert "| 32,768 tokens | 44 | 237 | 32,144 | 32,144 | 0 |" in text


def test_a_run_says_how_long_a_token_takes_to_compute() -> None:
    slow = StepCost(
        step_us=0, prefill_token_us=1.0, prefill_kv_us=0.5, decode_us=0, kv_token_us=0, fitted=True
    )
    report = of_config("qwen3.5-27b")
    made = tier_of(report, report.block_bytes, 100 * GIB, slow)
    assert [each.compute_s for each in made.prompts] == pytest.approx(
        [(1 + 0.25 * each.again) * each.again / 1e6 for each in made.prompts]
    )
    assert made.cost.fitted
