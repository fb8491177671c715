"""vLLM's own answers for a GPU that is not here: --like-device forces vLLM's CUDA platform in a simulator."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench import models
from kvtune.answers.doctor.facts import Facts
from kvtune.answers.doctor.model import ask_vllm
from kvtune.base.errors import KvtuneError
from kvtune.data.layout.models import SHAPES, config
from kvtune.data.platforms import DEVICES
from kvtune.lab.setup.resolve import check_engine
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from kvtune.requests.loads.spec import build
from tests.lab.sim.test_replay import replays

pytestmark = pytest.mark.vllm

CONFIGS = Path(__file__).parents[2] / "data/layout/configs"
SOME = ("deepseek-v4-flash", "qwen3.5-27b", "gemma-4-31b")
"""Shapes that `make test` replays; `make full` replays all."""
ALL = [
    pytest.param(name, marks=() if name in SOME else pytest.mark.full)
    for name in SHAPES
    if name not in models.SHORT
]


def on_h100(model: str, *flags: str, core: Any = "stock") -> Setup:
    args = ["--max-model-len", "32768", *flags]
    return Setup(
        model=model, engine_args=args, core=core, device=Simulated(), platform=DEVICES["h100"]
    ).sized()


@pytest.mark.full
def test_a_quantized_models_pool_is_what_its_weights_leave(simulators: Simulators) -> None:
    stock, ours = replays(
        simulators, models.LOAD, [on_h100("gpt-oss-20b", core=core) for core in ("stock", "kvtune")]
    )
    assert stock.header.engine.num_blocks == 165_094 and stock.header.engine.block_size == 16
    assert stock.header.engine.device == "cuda"
    assert models.hits(stock) == [0, 0, 97] and models.hits(ours) == [0, 97, 97]
    assumed = "165,094 blocks of 16 tokens, as if a step's activations and CUDA graphs took no memory"
    assert stock.header.engine.pool == assumed


def test_a_pool_that_a_flag_sizes_assumes_nothing(simulators: Simulators) -> None:
    (run,) = replays(simulators, models.LOAD, [on_h100("gpt-oss-20b", "--num-gpu-blocks-override", "9000")])
    assert run.header.engine.pool == "9,000 blocks of 16 tokens"


@pytest.mark.full
def test_latent_attention_is_cached(simulators: Simulators) -> None:
    (run,) = replays(simulators, models.LOAD, [on_h100("deepseek-v3", "--tensor-parallel-size", "16")])
    assert run.header.engine.settings["enable_prefix_caching"] and models.hits(run) == [0, 97, 97]
    assert {spec["$spec"] for spec in run.header.engine.kv_specs["specs"]} == {"MLAAttentionSpec"}


@pytest.mark.full
def test_states_are_one_ranks(simulators: Simulators) -> None:
    flags = [["--tensor-parallel-size", ranks] for ranks in ("1", "4")]
    one, four = replays(simulators, models.LOAD, [on_h100("nemotron-3-nano", *each) for each in flags])
    assert [run.header.engine.block_size for run in (one, four)] == [2096, 1056]
    assert one.header.engine.num_blocks < four.header.engine.num_blocks


@pytest.mark.full
def test_packed_blocks_end_where_the_kernels_keep_states(simulators: Simulators) -> None:
    """vLLM 0.33 makes its own blocks multiples of 64 for FlashInfer's kernel, 0.32 does not."""
    packed = on_h100("qwen3-next-80b", "--kv-cache-memory-bytes", "40000000000", core="kvtune")
    packed = msgspec.structs.replace(packed, core_settings={"packed": True})
    plain = on_h100("qwen3-next-80b", "--kv-cache-memory-bytes", "40000000000")
    stock, ours = replays(simulators, models.LOAD, [plain, packed])
    assert (stock.header.engine.block_size, ours.header.engine.block_size) in {(576, 64), (544, 48)}
    assert models.hits(ours)[2] >= models.hits(stock)[2]


@pytest.mark.full
def test_states_of_mamba_1_are_replayed_though_no_cpu_runs_them(
    simulators: Simulators, tmp_path: Path
) -> None:
    shutil.copy(CONFIGS / "jamba-1.5-mini.json", tmp_path / "config.json")
    flags = ["--kv-cache-memory-bytes", "40000000000"]
    stock, ours = replays(
        simulators, models.LOAD, [on_h100(str(tmp_path), *flags, core=core) for core in ("stock", "kvtune")]
    )
    assert stock.header.engine.block_size == 80 and len(stock.header.engine.kv_specs["groups"]) == 8
    assert "MambaSpec" in {spec["$spec"] for spec in stock.header.engine.kv_specs["specs"]}
    assert models.hits(stock) == models.hits(ours) == [0, 0, 97]


def test_the_smallest_pool_of_a_pipeline_is_the_engines(simulators: Simulators) -> None:
    """Each rank has 16 of 32 layers, 64 KiB a block each, beside 7.5 GiB of weights."""
    flags = [["--pipeline-parallel-size", ranks] for ranks in ("1", "2")]
    one, two = replays(simulators, models.LOAD, [on_h100("llama-3.1-8b", *each) for each in flags])
    assert (one.header.engine.num_blocks, two.header.engine.num_blocks) == (29_858, 67_376)
    assert models.hits(one) == models.hits(two) == [0, 97, 97]


@pytest.mark.full
@pytest.mark.parametrize("name", ALL)
def test_the_table_of_models_is_what_vllm_makes_of_them_here(name: str, simulators: Simulators) -> None:
    found = json.loads(models.RESULTS.read_text())
    if (version := check_engine().partition("+")[0]) not in found:
        pytest.skip(f"the table has no vLLM {version}")
    row = found[version][name]
    assert models.replayed(simulators, [name]) == {name: row}
    assert row["arithmetic"] != "differs"


FP8 = "qwen3-30b-a3b-fp8"
ON_ADA = {
    "llama-3.1-8b": (16, ["FLASH_ATTN"]),
    "deepseek-v3": (16, ["TRITON_MLA"]),  # FlashAttention's and FlashMLA's kernels begin at 9.0
    "qwen3-next-80b": (None, ["FLASH_ATTN", "GDN_ATTN"]),  # its states' size is a version's
    FP8: (16, ["FLASH_ATTN"]),
    "gpt-oss-20b": (16, ["TRITON_ATTN"]),  # its sinks need FlashAttention 3, from 9.0 on
}
ON_HOPPER = {
    **ON_ADA,
    "deepseek-v3": (16, ["FLASH_ATTN_MLA"]),
    "gpt-oss-20b": (16, ["FLASH_ATTN"]),
    "deepseek-v3.2": (64, ["DEEPSEEK_V32_INDEXER, FLASH_ATTN_MLA_SPARSE"]),
}
ON_BLACKWELL = {
    "llama-3.1-8b": (16, ["FLASHINFER"]),
    "deepseek-v3": (32, ["FLASHINFER_MLA"]),
    "deepseek-v4.1-flash": (128, None),
}
BATCH = {"l4": (2048, 256), "l40s": (2048, 256), "h200": (8192, 1024), "b200": (16_384, 1024)}


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("device", "models"),
    [("l4", ON_ADA), ("l40s", ON_ADA), ("h200", ON_HOPPER), ("b200", ON_BLACKWELL)],
)
def test_each_device_has_the_backends_and_batches_that_vllms_code_names_for_it(
    device: str, models: dict[str, tuple[int | None, list[str] | None]]
) -> None:
    """By compute capability (`vllm/platforms/cuda.py`, the backends' own checks) and memory (`get_batch_defaults`)."""
    for model, (hits, backends) in models.items():
        facts = asked(model, device)
        assert hits in (None, facts.hit_tokens) and facts.caching, model
        assert (facts.batched_tokens, facts.max_requests) == BATCH[device], model
        assert backends in (None, sorted({group.backend for group in facts.groups})), model


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("deepseek-v3.2", "No valid attention backend found"),  # vLLM's own refusal
        ("deepseek-v4-flash", "takes FLASHMLA_SPARSE_DSV4, which vLLM does not have for NVIDIA L40S"),
    ],
)
def test_a_model_without_kernels_for_the_device_is_refused_by_name(model: str, why: str) -> None:
    with pytest.raises(KvtuneError) as refused:
        asked(model, "l40s")
    assert why in refused.value.message and refused.value.hint


def asked(model: str, device: str, *flags: str) -> Facts:
    args = ["--max-model-len", "8192", *flags]
    return ask_vllm(Setup(model=model, engine_args=args, platform=DEVICES[device]))


@pytest.mark.full
def test_deepseek_v41s_tables_in_host_memory_are_refused_by_name_and_can_be_left_out(tmp_path: Path) -> None:
    published = config("deepseek-v4.1-flash")
    text = {**published["text_config"], "engram_layer_ids": [1, 14], "engram_pad_token_id": 2}  # type: ignore[dict-item]
    text |= {"engram_num_embeddings": [384_006_168, 384_016_682], "engram_vocab_size": 16_000_000}
    text |= {"engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256}
    text |= {"engram_compressed_vocab_size": 99_092}
    (tmp_path / "config.json").write_text(json.dumps(published | {"text_config": text}))
    with pytest.raises(KvtuneError, match="Engram CPU offload"):
        asked(str(tmp_path), "h100")
    without = asked(str(tmp_path), "h100", "--hf-overrides", '{"engram_layer_ids": []}')
    assert without.groups == asked("deepseek-v4.1-flash", "h100").groups


@pytest.mark.full
def test_a_model_that_vllms_own_child_cannot_import_is_replayed_on_a_fresh_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What vLLM knows of model classes it keeps in its cache, which a fresh machine does not have."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    setup = on_h100("qwen3.6-35b-a3b")
    with Simulators(parallel=1, model=setup.model, platform=setup.platform) as fresh:
        run = fresh.replay(setup.with_load(build("decode:requests=2,prompt=64,output=4")))
    assert len(run.table("requests")["id"]) == 2
