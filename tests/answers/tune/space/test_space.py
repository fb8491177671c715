"""Knobs, their legal values, grids and samples, and the flags that a trial's settings become."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.answers.tune.search import tuned_space
from kvtune.answers.tune.space.grid import build_space, choose, engine_only, grid, needs_tier, shown, size
from kvtune.answers.tune.space.model import model_facts
from kvtune.answers.tune.trials.setup import core_part, engine_part, packing_failure
from kvtune.base.errors import UsageError
from kvtune.data.flags import flag_value
from kvtune.data.knobs import ENGINE, GROUPS, KNOBS, ModelFacts
from kvtune.data.platforms import DEVICES
from kvtune.lab.setup.setup import Load, Pool, Setup

FACTS = ModelFacts(window=512, alignment=32, block_tokens=128, blocks=(32, 64, 128))


def bench(*flags: str, block: int = 32) -> Setup:
    return Setup(
        model="tiny-gemma3",
        load=Load(spec="rounds", seed=0, hash="h"),
        engine_args=list(flags),
        pool=Pool(block_tokens=block),
        core="kvtune",
    )


def test_no_knob_is_one_trial_of_the_defaults() -> None:
    assert list(grid(build_space([], [], FACTS))) == [{}]


def test_a_set_replaces_the_values_of_its_group() -> None:
    space = build_space(["pin"], ["slack=1,2", "core.min-drop=4"], FACTS)
    assert space["slack"] == (1, 2)
    assert space["min_drop"] == (4,)
    assert size(space) == len(list(grid(space))) == 3 * 2 * 3


@pytest.mark.parametrize("group", GROUPS)
def test_every_group_has_legal_values_only(group: str) -> None:
    for settings in grid(build_space([group], [], FACTS)):
        for name, value in settings.items():
            assert KNOBS[name].read_for(value, FACTS) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("slak=3", "slack"),
        ("slack", "512"),
        ("slack=-1", "whole number from 0"),
        ("slack=1.5", "whole number"),
        ("policy=best", "auto, first, two_class, chat, pin, lru"),
        ("block_size=40", "multiples of 32"),
        ("retention=often", "none, 0"),
        ("freeze=maybe", "true, false"),
    ],
)
def test_what_is_illegal_is_refused_with_what_is_legal(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        build_space([], [text], FACTS)
    assert says in refused.value.hint


def test_a_knob_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        build_space([], ["slack=1", "core.slack=2"], FACTS)


@given(st.integers(1, 40), st.integers(0, 1000))
def test_a_sample_is_distinct_seeded_and_from_the_grid(trials: int, seed: int) -> None:
    space = build_space(["pin", "retention"], [], FACTS)
    drawn = choose(space, trials, seed)
    assert drawn == choose(space, trials, seed)
    assert len({shown(s) for s in drawn}) == len(drawn) == min(trials, size(space))
    every = list(grid(space))
    assert all(s in every for s in drawn)


def test_a_huge_grid_asks_for_a_sample() -> None:
    many = ",".join(map(str, range(200)))
    with pytest.raises(UsageError, match="40,000 trials"):
        choose(build_space([], [f"slack={many}", f"min_drop={many}"], FACTS), 0, 0)


def test_settings_become_flags_and_core_settings() -> None:
    settings = {"slack": 1, "prefix_cache_retention_interval": "none", "max_num_seqs": 8}
    assert core_part(settings) == {"slack": 1}
    assert engine_part(settings) == {"prefix_cache_retention_interval": "none", "max_num_seqs": 8}
    assert bench("--seed", "1").with_knobs(settings).engine_args == [
        *("--seed", "1", "--prefix-cache-retention-interval", "None", "--max-num-seqs", "8")
    ]


@given(st.sampled_from([32, 64, 128, 256]), st.integers(100, 100_000))
def test_a_pool_in_blocks_keeps_its_tokens(block: int, blocks: int) -> None:
    asked = bench("--num-gpu-blocks-override", str(blocks))
    flags = asked.with_knobs({"block_size": block}).engine_args
    scaled = int(flag_value(flags, "num-gpu-blocks-override") or 0)
    assert abs(scaled * block - blocks * 32) < max(block, 2 * block)


def test_facts_of_built_in_models() -> None:
    gemma = model_facts("tiny-gemma3", 32, 4096)
    assert (gemma.window, gemma.block_tokens) == (512, 32)
    assert all(size % gemma.alignment == 0 for size in gemma.blocks)
    qwen = model_facts("tiny-qwen3next", None, 4096)
    assert qwen.state_layers > 0
    assert min(qwen.blocks) > 128  # a block must hold a state


def test_a_model_with_states_is_searched_over_layouts() -> None:
    facts = model_facts("tiny-granite", None, 780, caching_off=True)
    findings = list(grid(build_space(["block_size"], [], facts)))
    stock = [s for s in findings if "block_size" in s]
    packed = [s for s in findings if s.get("packed")]
    assert [s["block_size"] for s in stock] == [1216]  # a larger one could hit none of these requests
    assert [s["states_per_block"] for s in packed] == [1, 2] and len(findings) == 3
    # Caching is asked for, and what keeps stock's layout from crashing on the CPU then.
    assert all(s["enable_prefix_caching"] for s in findings)
    assert all(s.get("whole_states", s.get("packed")) for s in findings)
    choices = list(grid(build_space(["block_size"], [], model_facts("tiny-granite", None, 780))))
    assert not any("enable_prefix_caching" in s for s in choices) and len(choices) == 3


def test_packed_blocks_multiply_with_other_knobs_and_nothing_is_tried_twice() -> None:
    facts = model_facts("tiny-granite", None, 780)
    named = ["packed=true,false", "states_per_block=1,4", "prefix_match_unit=none,32", "retention=0,none"]
    findings = list(grid(build_space(["block_size"], named, facts)))
    assert all(
        "enable_prefix_caching" not in s for s in findings
    )  # the person names the layout, and all it needs
    assert len(findings) == len({shown(s) for s in findings}) == (2 + 1) * 2 * 2
    assert all("states_per_block" not in s for s in findings if not s["packed"])
    assert core_part(findings[0]) == {"packed": True, "states_per_block": 1}


@pytest.mark.parametrize(
    ("model", "text", "says"),
    [
        ("tiny-gemma3", "packed=true", "no recurrent states"),
        ("tiny-opt", "core.packed=true,false", "no recurrent states"),
        ("tiny-granite", "states_per_block=9", "not legal"),
    ],
)
def test_packed_blocks_are_refused_by_name(model: str, text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build_space([], [text], model_facts(model, None, 4096))


def test_tune_searches_layout_match_unit_and_retention_together() -> None:
    facts = model_facts("tiny-granite", None, 4096)
    space = tuned_space(facts, {})
    assert list(space) == ["layout", "keep_states", "prefix_cache_retention_interval", "prefix_match_unit"]
    assert any(s.get("packed") and s["prefix_match_unit"] == 32 for s in grid(space))
    assert "layout" not in tuned_space(facts, {"block_size": "1280"})
    assert model_facts("tiny-granite", None, 4096, core="stock").layouts == ()


def test_a_pool_in_blocks_keeps_its_bytes_when_it_is_packed() -> None:
    pool = ["--num-gpu-blocks-override", "100"]
    granite = Setup(model="tiny-granite", engine_args=pool, pool=Pool(block_tokens=1280), core="kvtune")
    flags = granite.with_knobs({"packed": True, "states_per_block": 1}).engine_args
    assert flag_value(flags, "num-gpu-blocks-override") == "800"


def test_a_run_whose_blocks_could_not_be_packed_is_no_trial_of_them() -> None:
    parts = {"core": {"parts": {"packed": False}}, "notes": ["x", "packed: a KV connector moves pages"]}
    assert packing_failure(parts) == "packed: a KV connector moves pages"
    assert "no states" in packing_failure({"core": {"parts": {"packed": False}}})
    assert packing_failure({"core": {"parts": {"packed": True}}}) == packing_failure({}) == ""


def test_intervals_between_prompts_are_tried_where_the_scheduler_keeps_them() -> None:
    acting = ModelFacts()
    assert build_space([], ["prefill_schedule_interval=1,4"], acting)["prefill_schedule_interval"] == (1, 4)
    assert tuned_space(acting, {}, timed=True)["prefill_schedule_interval"] == (1, 2, 4, 8)
    assert "prefill_schedule_interval" not in tuned_space(acting, {})  # it changes times, and no hits
    given = {"prefill_schedule_interval": "2"}
    assert "prefill_schedule_interval" not in tuned_space(acting, given, timed=True)
    inert = ModelFacts(ignored={"prefill_schedule_interval": "the scheduler does nothing with it"})
    assert "prefill_schedule_interval" not in tuned_space(inert, {}, timed=True)
    assert KNOBS["prefill_schedule_interval"].read_for("1", inert) == 1
    with pytest.raises(UsageError, match="=4 has no effect here: the scheduler does nothing with it"):
        build_space([], ["prefill_schedule_interval=1,4"], inert)


STATES = ModelFacts(state_layers=3, block_tokens=544)


@pytest.mark.parametrize(
    ("facts", "text", "says", "hint"),
    [
        (
            STATES,
            "mamba_cache_mode=none",
            "with prefix caching on vLLM makes it align",
            "enable_prefix_caching",
        ),
        (replace(STATES, caching=False), "mamba_cache_mode=align", "off vLLM makes it none", "=true"),
        (STATES, "mamba_block_size=64", "the attention block, 544 tokens", "block_size sets both"),
        (STATES, "enable_mamba_shared_prefix_checkpoint=true", "with a drafter", "--speculative-config"),
        (FACTS, "mamba_cache_mode=align", "no recurrent states", "leave it out"),
        (FACTS, "mamba_block_size=64", "no recurrent states", "leave it out"),
        (FACTS, "enable_mamba_shared_prefix_checkpoint=true", "no recurrent states", "leave it out"),
    ],
)
def test_a_setting_of_states_that_does_nothing_is_refused_with_why(
    facts: ModelFacts, text: str, says: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        build_space([], [text], facts)
    assert "has no effect here" in refused.value.message and hint in refused.value.hint


def test_settings_of_states_that_act_are_tried() -> None:
    drafted = replace(STATES, drafts=True)
    chosen = ["enable_mamba_shared_prefix_checkpoint=false,true", "num_speculative_tokens=0,2"]
    assert size(build_space([], chosen, drafted)) == 4
    assert build_space([], ["mamba_cache_mode=align", "mamba_block_size=544"], STATES)
    unknown = ModelFacts(unknown="no config.json")
    assert build_space([], ["mamba_block_size=64", "mamba_cache_mode=none"], unknown)
    with pytest.raises(UsageError, match="mamba_cache_mode=all is not legal"):
        build_space([], ["mamba_cache_mode=all"], STATES)


def test_drafts_become_a_speculative_configuration_that_keeps_the_users_drafter() -> None:
    name = "speculative-config"
    told = json.loads(flag_value(bench().with_knobs({"num_speculative_tokens": 2}).engine_args, name) or "")
    assert told == {"method": "mtp", "num_speculative_tokens": 2}
    users = bench("--speculative-config", '{"method":"eagle3","model":"D","num_speculative_tokens":3}')
    told = json.loads(flag_value(users.with_knobs({"num_speculative_tokens": 1}).engine_args, name) or "")
    assert told == {"method": "eagle3", "model": "D", "num_speculative_tokens": 1}
    assert users.with_knobs({"num_speculative_tokens": 0}).engine_args == []
    assert "speculative" not in " ".join(bench().with_knobs({"num_speculative_tokens": 0}).engine_args)
    assert bench().with_knobs({"mamba_cache_mode": "none"}).engine_args == ["--mamba-cache-mode", "none"]


def test_a_setting_that_this_vllm_lacks_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "cache.py"
    config.write_text("    prefix_cache_retention_interval: int | None = None\n")
    monkeypatch.setattr("kvtune.plugin.vllm.names.source_path", lambda module: config)
    monkeypatch.setattr("kvtune.plugin.vllm.names.installed_version", lambda: "0.20.0")
    facts = model_facts("tiny-qwen3next", None, 4096)
    assert "prefix_cache_retention_interval" not in facts.ignored
    for name in ("prefix_match_unit", "mamba_block_size", "enable_mamba_shared_prefix_checkpoint"):
        with pytest.raises(UsageError, match="has no such setting"):
            build_space([], [f"{name}=64"], facts)


def test_the_search_proposes_no_layout_that_the_attention_kernels_refuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same search on a GPU: packed blocks with FlashAttention, none with FlashInfer."""
    monkeypatch.setattr("kvtune.answers.tune.space.model.here", lambda: DEVICES["h100"])

    def tried(attention: str) -> list[bool]:
        facts = model_facts(
            "qwen3-next-80b", None, 4096, engine_args=["--attention-backend", attention] if attention else []
        )
        return [bool(choice.get("packed")) for choice in grid(build_space(["block_size"], [], facts))]

    assert any(tried("")) and any(tried("FLASH_ATTN"))
    assert tried("FLASHINFER") and not any(tried("FLASHINFER"))
    with pytest.raises(UsageError, match="FlashInfer take blocks of 16, 32, 64"):
        build_space(
            [],
            ["packed=true"],
            model_facts("qwen3-next-80b", None, 4096, engine_args=["--attention-backend=FLASHINFER"]),
        )


@pytest.mark.parametrize("model", ["tiny-gemma3", "tiny-llama", "not/local"])
def test_blocks_chunk_and_seats_are_those_of_the_device_that_engines_are_like(model: str) -> None:
    large = model_facts(model, None, 4096, platform=DEVICES["h100"])
    assert (large.block_tokens, large.alignment) == (16, 16)
    assert large.blocks[0] == 16 and not any(size % 16 for size in large.blocks)
    assert (large.batched_tokens, large.sequences) == (8192, 1024)
    assert model_facts(model, 64, 4096, platform=DEVICES["h100"]).block_tokens == 64
    small = model_facts(model, None, 4096, platform=DEVICES["cpu"], engine_args=["-pp", "2"])
    assert (small.block_tokens, small.batched_tokens, small.sequences) == (128, 4096, 256)


def test_states_make_the_blocks_of_the_device_that_engines_are_like() -> None:
    blocks = [
        model_facts("tiny-qwen3next", None, 4096, platform=at).block_tokens
        for at in (DEVICES["h100"], replace(DEVICES["cpu"], float32_states=True), DEVICES["cpu"])
    ]
    assert blocks == [144, 384, 256]


def test_a_knob_of_the_front_end_can_be_tried_by_an_engine_only() -> None:
    name, values, facts = "stream_interval", (1, 4, 16), ModelFacts()
    space = build_space([], [f"{name}={','.join(map(str, values))}"], facts)
    assert space[name] == KNOBS[name].candidates(facts) == values
    with pytest.raises(UsageError, match=f"{name} changes nothing in simulation") as caught:
        engine_only(space)
    assert "--on host" in caught.value.hint
    with pytest.raises(UsageError, match="is not legal"):
        KNOBS[name].read_for("0", facts)
    assert name not in tuned_space(facts, {}, timed=True)  # a replay has no front end


def test_the_size_of_a_tier_is_a_knob_in_gib() -> None:
    facts = ModelFacts()
    assert build_space([], ["kv_offloading_size=0,0.5,2"], facts)["kv_offloading_size"] == (0.0, 0.5, 2.0)
    for wrong in ("-1", "nan", "inf", "much"):
        with pytest.raises(UsageError, match="is not legal"):
            KNOBS["kv_offloading_size"].read_for(wrong, facts)


TIER_GRID = [
    "kv_offloading_size=0,1",
    "eviction_policy=lru,arc",
    "blocks_per_chunk=4",
    "store_threshold=2",
]


def test_knobs_of_a_tier_have_legal_values_and_none_where_there_is_no_tier() -> None:
    tried = list(grid(build_space([], TIER_GRID, FACTS)))
    rest = {"blocks_per_chunk": 4, "store_threshold": 2}
    assert tried == [
        {"kv_offloading_size": 0.0},
        {"kv_offloading_size": 1.0, "eviction_policy": "lru", **rest},
        {"kv_offloading_size": 1.0, "eviction_policy": "arc", **rest},
    ]
    for wrong in ("eviction_policy=mine.Policy", "eviction_policy=kvtune", "blocks_per_chunk=0"):
        with pytest.raises(UsageError, match="is not legal"):
            build_space([], [wrong], FACTS)


def test_a_knob_of_a_tier_without_a_tier_is_refused() -> None:
    space = build_space([], ["eviction_policy=lru,arc"], FACTS)
    with pytest.raises(UsageError, match="eviction_policy changes nothing without a tier"):
        needs_tier(space, {"block_size"})
    needs_tier(space, {"kv_offloading_size"})
    needs_tier(build_space([], TIER_GRID, FACTS), set())
    needs_tier(build_space([], ["slack=1"], FACTS), set())


def test_tune_searches_a_tier_only_where_the_command_line_has_one() -> None:
    knobs = {"kv_offloading_size", "eviction_policy", "blocks_per_chunk", "store_threshold"}
    assert not knobs & set(tuned_space(FACTS, {}, timed=True))
    space = tuned_space(FACTS, {"kv_offloading_size": "4"})
    assert knobs <= set(space)
    assert space["kv_offloading_size"] == (0.5, 1.0, 2.0, 4.0), "never more than was asked for"
    assert space["eviction_policy"] == ("lru", "arc")
    given = tuned_space(FACTS, {"kv_offloading_size": "4", "eviction_policy": "arc", "store_threshold": "2"})
    assert knobs & set(given) == {"kv_offloading_size", "blocks_per_chunk"}


def test_a_knob_of_a_tier_that_this_vllm_does_not_read_stands_aside_by_name() -> None:
    facts = ModelFacts(ignored={"store_threshold": "nothing reads it"})
    assert "store_threshold" not in tuned_space(facts, {"kv_offloading_size": "4"})
    assert KNOBS["store_threshold"].read_for("0", facts) == 0
    with pytest.raises(UsageError, match="store_threshold=2 has no effect here: nothing reads it"):
        build_space([], ["store_threshold=0,2"], facts)


def extra_of(flags: list[str]) -> object:
    assert sum(word == "--kv-transfer-config" for word in flags) == 1
    return json.loads(flag_value(flags, "kv-transfer-config") or "")["kv_connector_extra_config"]


def test_a_trials_tier_goes_into_the_connectors_settings_beside_the_users() -> None:
    tier = {"eviction_policy": "lru", "blocks_per_chunk": 2}
    assert extra_of(bench("--kv-offloading-size", "4").with_knobs(tier).engine_args) == tier
    given = '{"kv_connector_extra_config":{"eviction_policy":"arc","block_size":64,"max_tracker_size":9}}'
    users = bench("--kv-offloading-size", "4", "--kv-transfer-config", given)
    flags = users.with_knobs({**tier, "kv_offloading_size": 2.0}).engine_args
    assert extra_of(flags) == {**tier, "max_tracker_size": 9}
    assert flag_value(flags, "kv-offloading-size") == "2.0"
    assert users.with_knobs({}).engine_args == list(users.engine_args)


def test_a_size_of_0_takes_the_tier_away() -> None:
    given = '{"kv_connector_extra_config":{"eviction_policy":"arc"}}'
    users = bench("--seed", "1", "--kv-offloading-size", "4", "--kv-transfer-config", given)
    assert users.with_knobs({"kv_offloading_size": 0.0}).engine_args == ["--seed", "1"]


@pytest.mark.parametrize("facts", [ModelFacts(), ModelFacts(window=512), ModelFacts(state_layers=2)])
def test_stock_is_searched_by_vllms_own_flags_alone(facts: ModelFacts) -> None:
    space = tuned_space(facts, {}, core="stock")
    assert set(space) <= set(ENGINE) and {"block_size", "max_num_seqs"} <= set(space)
    assert "prefix_cache_retention_interval" in space or not (facts.window or facts.state_layers)
