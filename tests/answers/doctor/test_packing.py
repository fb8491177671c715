"""Block layouts of a model with states: their costs add up, and which one is recommended."""

from __future__ import annotations

import json
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.answers.doctor.diagnosis import diagnosed
from kvtune.answers.doctor.document import document
from kvtune.answers.doctor.model import ModelReport
from kvtune.answers.doctor.packing import LEAST_CAPACITY, Load, kernel_refusal, layouts_of, load_of, pays
from kvtune.answers.doctor.planned import read_config
from kvtune.data.layout.config import shape_of
from kvtune.data.layout.models import config
from kvtune.data.layout.plan import (
    CPU,
    FLASHINFER,
    GPU,
    Backend,
    ModelShape,
    StateTensor,
    gpu_backend,
    packed_plans,
    plan_per_layer,
)
from kvtune.data.show.screen import WIDTH, document_lines
from kvtune.requests.loads.spec import build

CONFIGS = Path(__file__).parents[2] / "data" / "layout" / "configs"
GRANITE = shape_of(config("tiny-granite"), "tiny-granite")
ROUNDS = load_of(build("rounds:prefixes=8,prefix=700,suffix=64,output=16,rounds=3"))
POOL = 1 << 30


def real(name: str) -> ModelShape:
    return shape_of(json.loads((CONFIGS / f"{name}.json").read_text()), name)


def test_a_short_shared_prefix_picks_the_blocks_that_hit_it() -> None:
    layouts = layouts_of(GRANITE, CPU, POOL, load=ROUNDS)
    stock, packed = layouts.rows[0], layouts.rows[layouts.recommended]
    assert (stock.block_tokens, stock.hit_share, stock.groups) == (1280, 0.0, 2)
    # Blocks of 160 hit no more of 700 tokens than blocks of 320, and have nine groups instead of five.
    assert (packed.states_per_block, packed.block_tokens, packed.groups) == (2, 320, 5)
    assert layouts.rows[1].states_per_block == 1 and layouts.rows[1].hit_share == packed.hit_share
    assert packed.hit_share == pytest.approx(16 * 640 / (24 * 764))  # the first visit of each prefix is cold
    assert packed.resend_tokens == 32 and packed.pareto and packed.capacity > 1.0


def test_the_table_recommends_a_layout_and_fits_a_terminal() -> None:
    config_facts = read_config("tiny-granite", [])
    layouts = layouts_of(GRANITE, CPU, POOL, load=ROUNDS)
    text = document_lines(document(diagnosed((), (), ModelReport.of(config_facts, layouts))))
    assert any(line.startswith("packed 2  ->*") and "320" in line and "55.8 %" in line for line in text)
    assert any(line.startswith("stock") and "1,280" in line for line in text)
    assert any("packed 2 (320 tokens): up to 55.8% of the prompt tokens can hit" in line for line in text)
    assert max(map(len, text)) <= WIDTH


def test_stock_stays_where_smaller_blocks_gain_nothing() -> None:
    cold = load_of(build("decode:requests=20,prompt=48,output=200"))
    layouts = layouts_of(GRANITE, CPU, POOL, load=cold)
    assert layouts.recommended == 0 and "gain this workload 0.0 points" in layouts.why


def test_a_layout_with_less_capacity_is_recommended_only_where_hits_pay_for_it() -> None:
    shape = real("granite-4.0-h-small")
    plain = layouts_of(shape, GPU, 16 << 30)
    finest = plain.rows[1]
    assert finest.block_tokens == 144 and finest.capacity < LEAST_CAPACITY
    assert plain.recommended == 0 and "-w" in plain.why
    # Shared prefixes of 450 tokens: blocks of 144 hit 432 of them, stock's 528 none.
    shared = layouts_of(shape, GPU, 16 << 30, load=Load((4096,) * 10, 5000, (0, *(450,) * 9), "made"))
    assert pays(shared.rows[1], shared.rows[0])
    assert shared.rows[shared.recommended].states_per_block == 1
    # The same blocks where nearly all is cold: what does not fit is not paid for.
    cold = layouts_of(shape, GPU, 16 << 30, load=Load((4096,) * 100, 50_000, (450, *(0,) * 99), "made"))
    assert not pays(cold.rows[1], cold.rows[0])
    assert cold.rows[cold.recommended].states_per_block != 1


def test_an_engine_that_cannot_pack_has_stocks_layout_only() -> None:
    layouts = layouts_of(GRANITE, CPU, POOL, refusal="a KV connector moves pages by stock's layout")
    assert (len(layouts.rows), layouts.recommended) == (1, 0) and "KV connector" in layouts.why
    assert packed_plans(shape_of(config("tiny-gemma3")), CPU, 4096) == {}


shapes = st.builds(
    ModelShape,
    name=st.just("any"),
    attention_layers=st.integers(1, 40),
    kv_heads=st.integers(1, 16),
    head_dim=st.sampled_from([32, 64, 128]),
    kv_element_bytes=st.sampled_from([1, 2, 4]),
    state_layers=st.integers(1, 60),
    states=st.tuples(
        st.builds(StateTensor, st.just("ssm"), st.tuples(st.integers(1, 512), st.integers(64, 512)), st.just(4))
    ),
)  # fmt: skip


@given(shapes, st.sampled_from([CPU, GPU]), st.integers(1, 20_000))
def test_waste_by_cause_adds_up_to_all_bytes_of_a_request(
    shape: ModelShape, backend: object, tokens: int
) -> None:
    for plan in (plan_per_layer(shape, backend), *packed_plans(shape, backend, 4096).values()):  # type: ignore[arg-type]
        waste = plan.waste(tokens)
        assert sum(astuple(waste)) == plan.request_blocks(tokens) * plan.block_bytes
        assert min(astuple(waste)) >= 0
        assert waste.tail < plan.block_tokens * shape.token_bytes


@given(
    shapes, st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1)), min_size=1, max_size=8), st.booleans()
)
def test_no_layout_below_least_capacity_is_recommended_unless_hits_pay(
    shape: ModelShape, requests: list[tuple[int, float]], weighed: bool
) -> None:
    shared = tuple(int(tokens * share) for tokens, share in requests)
    load = Load(tuple(t for t, _ in requests), sum(t for t, _ in requests) if weighed else 0, shared)
    layouts = layouts_of(shape, GPU, 8 << 30, load=load)
    row = layouts.rows[layouts.recommended]
    assert layouts.recommended == 0 or row.capacity >= LEAST_CAPACITY or pays(row, layouts.rows[0])
    assert any(r.pareto for r in layouts.rows)


def test_kernels_that_take_few_blocks_refuse_packed_ones_by_name() -> None:
    """FlashInfer's kernels take 16, 32 or 64 tokens; a packed block stays whole."""
    shape = shape_of(config("qwen3-next-80b"))
    assert packed_plans(shape, GPU, 4096) and not kernel_refusal(shape, GPU)
    assert packed_plans(shape, FLASHINFER, 4096) == {}
    refused = kernel_refusal(shape, FLASHINFER)
    assert "FlashInfer take blocks of 16, 32, 64 tokens" in refused and "FLASH_ATTN" in refused
    assert kernel_refusal(shape_of(config("tiny-gemma3")), FLASHINFER) == ""  # nothing to pack


@pytest.mark.parametrize(
    ("attention", "capability", "expected"),
    [
        ("", 9, GPU),
        ("", 10, FLASHINFER),
        ("", 12, GPU),
        ("FLASHINFER", 9, FLASHINFER),
        ("FLASH_ATTN", 10, GPU),
        ("flashinfer", 0, FLASHINFER),
    ],
)
def test_the_attention_backend_is_the_flags_or_vllms_choice(
    attention: str, capability: int, expected: Backend
) -> None:
    assert gpu_backend(attention, capability) is expected
