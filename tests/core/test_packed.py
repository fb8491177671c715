"""The packed switch in the simulator: vLLM's own EngineCore over tiny-granite's specs, hits and block sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.analysis.summary import summary
from kvtune.core import packed
from kvtune.engine.models import config
from kvtune.sim.planner import CPU, least_aggregate_tokens, plan_aggregate, plan_per_layer
from kvtune.sim.planner_config import shape_of
from kvtune.sim.settings import SimSettings
from kvtune.sim.simulators import Simulators
from kvtune.workload.spec import build

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

CACHING = ["--enable-prefix-caching"]
SHAPE = shape_of(config("tiny-granite"), "tiny-granite")


LAYOUTS: dict[str, dict[str, Any]] = {
    "stock": {"whole_states": True},
    "packed": {"packed": True},
    "four": {"packed": True, "states_per_block": 4},
}


@pytest.fixture(scope="module")
def runs() -> dict[str, dict[str, Any]]:
    """Summaries by layout and prefix length; `stock` is the core with stock's blocks."""
    settings = [
        SimSettings(model="tiny-granite", engine_args=CACHING, core="kvtune", core_settings=chosen)
        for chosen in LAYOUTS.values()
    ]
    found = {}
    with Simulators(1) as simulators:
        for prefix in (700, 1500):
            workload = build(f"rounds:prefixes=2,prefix={prefix},suffix=64,output=8,rounds=3", seed=1)
            for number, run in simulators.map(workload, settings):
                assert not isinstance(run, Exception), run
                found[f"{list(LAYOUTS)[number]} {prefix}"] = summary(run, workload)
    return found


def hits(runs: dict[str, dict[str, Any]], name: str) -> int:
    """Tokens that each of the two prompts hits at its third visit."""
    return int(runs[name]["rounds"][2]["hit_tokens"]) // 2


@pytest.mark.long
def test_blocks_and_capacity_are_the_planners(runs: dict[str, dict[str, Any]]) -> None:
    plans = {
        "stock": plan_per_layer(SHAPE, CPU),
        "packed": plan_aggregate(SHAPE, CPU, least_aggregate_tokens(SHAPE, CPU)),
        "four": plan_aggregate(SHAPE, CPU, least_aggregate_tokens(SHAPE, CPU, 4)),
    }
    for name, plan in plans.items():
        engine = runs[f"{name} 700"]["engine"]
        assert engine["block_size"] == plan.block_tokens
        assert engine["num_blocks"] == (1 << 30) // plan.block_bytes


@pytest.mark.long
def test_a_shared_prefix_shorter_than_stocks_block_is_hit(runs: dict[str, dict[str, Any]]) -> None:
    assert hits(runs, "stock 700") == 0
    assert hits(runs, "packed 700") == 640
    assert hits(runs, "four 700") == 608


@pytest.mark.long
def test_a_shared_prefix_is_hit_further(runs: dict[str, dict[str, Any]]) -> None:
    assert hits(runs, "stock 1500") == 1280
    assert hits(runs, "packed 1500") == 1440


def engine_of(**changed: Any) -> Any:
    """As much of a VllmConfig as `refusal` reads."""
    cache = {"cache_dtype": "auto", "kv_cache_dtype_skip_layers": [], "mamba_cache_mode": "align"}
    return SimpleNamespace(
        model_config=SimpleNamespace(use_mla=changed.pop("use_mla", False)),
        kv_transfer_config=changed.pop("kv_transfer_config", None),
        speculative_config=changed.pop("speculative_config", None),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=changed.pop("dcp", 1),
            prefill_context_parallel_size=changed.pop("pcp", 1),
        ),
        cache_config=SimpleNamespace(**{**cache, **changed}),
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"use_mla": True}, "MLA"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"dcp": 2}, "context parallel"),
        ({"pcp": 2}, "context parallel"),
        ({"cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "several KV dtypes"),
        ({"mamba_cache_mode": "all"}, "--mamba-cache-mode all"),
        ({"speculative_config": object()}, "speculative"),
    ],
)
def test_refused_by_name(changed: dict[str, Any], says: str) -> None:
    assert says in packed.refusal(engine_of(**changed), [])


def test_a_backend_without_the_layout_is_refused_by_name() -> None:
    from vllm.v1.kv_cache_layout import KVCacheLayout

    backend = SimpleNamespace(
        get_name=lambda: "TURBOQUANT", supported_kv_cache_layouts=lambda: (KVCacheLayout.LBNHC,)
    )
    assert "TURBOQUANT" in packed.refusal(engine_of(), [backend])
    assert packed.refusal(engine_of(), []) == ""
