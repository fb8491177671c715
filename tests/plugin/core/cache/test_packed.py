"""The packed switch in the simulator: vLLM's own EngineCore over tiny-granite's specs, hits and block sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.data.installed import release
from kvtune.data.layout.config import shape_of
from kvtune.data.layout.models import config
from kvtune.data.layout.plan import CPU, least_aggregate_tokens, plan_aggregate, plan_per_layer
from kvtune.lab.setup.setup import Setup
from kvtune.plugin.core.cache import packed
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from kvtune.requests.loads.spec import build
from tests.simulator import SHARED, on

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
        Setup(model="tiny-granite", engine_args=CACHING, core="kvtune", core_settings=chosen)
        for chosen in LAYOUTS.values()
    ]
    by_name = {}
    with SHARED.simulators() as simulators:
        for prefix in (700, 1500):
            workload = build(f"rounds:prefixes=2,prefix={prefix},suffix=64,output=8,rounds=3", seed=1)
            for number, run in simulators.run(on(workload, settings)):
                assert not isinstance(run, Exception), run
                by_name[f"{list(LAYOUTS)[number]} {prefix}"] = summary(RunAnalysis(run, workload))
    return by_name


def hits(runs: dict[str, dict[str, Any]], name: str) -> int:
    """Tokens that each of the two prompts hits at its third visit."""
    return int(runs[name]["rounds"][2]["hit_tokens"]) // 2


def test_whole_states_on_another_device_changes_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.platforms import current_platform

    from kvtune.plugin.core import state
    from kvtune.plugin.core.settings import parse
    from kvtune.plugin.vllm.plugin_state import STATE

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    try:
        packed.install(parse({"whole_states": True}))
        assert not [patch for patch in STATE.patches.installed() if patch.part == packed.PART]
        assert any("only hybrids on a CPU need it" in note for note in state.state()["notes"])
    finally:
        STATE.reset()


@pytest.mark.parametrize("chosen", [{}, {"whole_states": True}, {"packed": True}])
def test_an_engine_core_keeps_its_blocks_when_it_completes_its_config_again(chosen: dict[str, bool]) -> None:
    """That of 0.32 goes back to 128 after its start, on a CPU, and then hits of a hybrid answer wrongly."""
    from vllm import __version__
    from vllm.config import set_current_vllm_config
    from vllm.v1.core import kv_cache_utils

    from kvtune.lab.engine.config import engine_config, parse_engine_args
    from kvtune.lab.setup.resolve import resolve
    from kvtune.plugin.core.settings import parse
    from kvtune.plugin.vllm.plugin_state import STATE

    arguments = resolve("tiny-granite", dummy=True, engine_args=CACHING).args
    made = engine_config(parse_engine_args(arguments))
    try:
        packed.install(parse(chosen))
        made.cache_config.kv_cache_layout = "LBNHC"
        with set_current_vllm_config(made):
            kv_cache_utils._get_packed_kv_cache_groups(made, {})
        made.cache_config.block_size = 160
        made.__post_init__()
        assert made.cache_config.block_size == (160 if chosen or release(__version__) >= (0, 33) else 128)
    finally:
        STATE.reset()


@pytest.mark.full
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


@pytest.mark.full
def test_a_shared_prefix_shorter_than_stocks_block_is_hit(runs: dict[str, dict[str, Any]]) -> None:
    assert hits(runs, "stock 700") == 0
    assert hits(runs, "packed 700") == 640
    assert hits(runs, "four 700") == 608


@pytest.mark.full
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
            pipeline_parallel_size=changed.pop("pp", 1),
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
        ({"pp": 2}, "pipeline parallel"),
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


def kernels(name: str, *sizes: Any) -> Any:
    return SimpleNamespace(get_name=lambda: name, get_supported_kernel_block_sizes=lambda: list(sizes))


def layers(attention: int, states: int, **changed: Any) -> list[Any]:
    """Specs of tiny-granite's shape: 256 bytes a token and attention layer, 304,896 bytes a state."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

    one = FullAttentionSpec(block_size=32, num_kv_heads=1, head_size=32, dtype=torch.float32)
    state = MambaSpec(block_size=32, shapes=((76224,),), dtypes=(torch.float32,), **changed)
    return [one] * attention + [state] * states


def test_a_block_holds_the_states_asked_for_and_may_be_raised() -> None:
    from vllm.v1.attention.backend import MultipleOf

    cpu = [kernels("CPU_ATTN", MultipleOf(32))]
    specs = layers(8, 8)
    assert packed.block_of(specs, cpu, 1, 0) == (160, "")
    assert packed.block_of(specs, cpu, 2, 0) == (320, "")
    assert packed.block_of(specs, cpu, 1, 200) == (224, "")  # --block-size 200
    assert packed.block_of(specs, cpu, 1, 32) == (160, "")  # it can only raise
    # A state is kept inside a chunk only where the kernels can.
    assert packed.block_of(specs, cpu, 1, 0, 64) == (192, "")
    assert packed.block_of(specs, cpu, 1, 200, 64) == (256, "")
    # Two backends: a multiple of both; one without a word takes what the other does.
    both = [*cpu, kernels("OTHER", MultipleOf(48)), kernels("SILENT")]
    assert packed.block_of(specs, both, 1, 0) == (192, "")


@pytest.mark.parametrize(
    ("specs", "states", "says"),
    [
        (lambda: layers(8, 8), 9, "states_per_block 9 of a model with 8 state layers"),
        (lambda: layers(8, 0), 1, "neither attention nor states"),
        (lambda: [*layers(8, 8), *layers(0, 1, num_speculative_blocks=2)], 1, "pages of several sizes"),
    ],
)
def test_layers_that_cannot_be_packed_are_named(specs: Any, states: int, says: str) -> None:
    from vllm.v1.attention.backend import MultipleOf

    block, why = packed.block_of(specs(), [kernels("CPU_ATTN", MultipleOf(32))], states, 0)
    assert block == 0 and says in why


def test_kernels_that_take_other_blocks_are_named() -> None:
    block, why = packed.block_of(layers(8, 8), [kernels("FLASHINFER", 16, 32, 64)], 1, 0)
    assert block == 0
    assert why == "the kernels of FLASHINFER take blocks of 16, 32, 64 tokens, not of 160"


def test_the_state_says_whether_blocks_are_packed() -> None:
    from kvtune.data.knobs import CoreSettings
    from kvtune.plugin.core import state

    packed.install(CoreSettings(packed=True))
    assert state.state()["parts"]["packed"] is False  # until a model with states is there
