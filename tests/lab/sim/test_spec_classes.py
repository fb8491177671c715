"""Every class of KV spec that the installed vLLM has: written, read, replayed with the core and without; or refused.

The models are made up: two layers of the class, and one of it beside a layer with full attention, each replayed by
vLLM's own managers. vLLM groups the layers itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from kvtune.base.errors import KvtuneError
from kvtune.data.installed import installed_version
from kvtune.data.run.types import Run
from kvtune.lab.setup.like import stand_in
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from kvtune.requests.loads.spec import build
from tests.simulator import on

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

ROUNDS = "rounds:prefixes=2,prefix=600,suffix=50,output=8,rounds=3"
TIGHT = "chat:sessions=10,turns=3,first=300,output=150,rate=4"
HEADS: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 1,
    "head_size": 64,
    "dtype": {"$dtype": "bfloat16"},
}
FIELDS: dict[str, dict[str, Any]] = {
    "FullAttentionSpec": HEADS,
    "MLAAttentionSpec": HEADS,
    "HiddenStateCacheSpec": HEADS,
    "RSWASpec": HEADS | {"rswa_window": 64},
    "SinkFullAttentionSpec": HEADS | {"sink_len": 16},
    "ChunkedLocalAttentionSpec": HEADS | {"attention_chunk_size": 128},
    "SlidingWindowSpec": HEADS | {"sliding_window": 64},
    "SlidingWindowMLASpec": HEADS | {"sliding_window": 64},
    "CircularBufferSpec": HEADS,
}
HELPED = {"SlidingWindowSpec", "SlidingWindowMLASpec"}
"""Classes with windows that the core keeps."""
BESIDE_ONLY = {"CircularBufferSpec", "SinkFullAttentionSpec"}
"""Classes that nothing hits alone: the first is not cached, the second's manager does not start in vLLM."""
REFUSED = {
    "EncoderOnlyAttentionSpec": (HEADS, "Unsupported KV cache spec type"),
    "CrossAttentionSpec": (HEADS, "CrossAttentionManager does not support caching"),
    "HiSparseHotSpec": (
        {"block_size": 16, "page_size": 2048, "blocks_per_request": 4},
        "NotImplementedError",
    ),
    "HiSparseResidentSpec": ({"block_size": 16, "page_size": 2048}, "NotImplementedError"),
}
"""Classes that vLLM itself does not serve beside full attention with prefix caching, and its words."""
BY_MODELS = {"MambaSpec"}
"""Classes that tiny models have: tests/lab/sim/test_replay.py."""
BASES = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}


def classes() -> set[str]:
    from vllm.v1 import kv_cache_interface as interface

    specs = {name for name, kind in vars(interface).items() if isinstance(kind, type)}
    return {name for name in specs if issubclass(getattr(interface, name), interface.KVCacheSpec)} - BASES


def captured(*names: str, blocks: int) -> dict[str, Any]:
    fields = FIELDS | {name: fields for name, (fields, _) in REFUSED.items()}
    return {
        "version": 1,
        "num_blocks": blocks,
        "specs": [{"$spec": name, "fields": fields[name]} for name in names],
        "layers": {f"model.layers.{number}": number for number in range(len(names))},
        "groups": [[f"model.layers.{number}"] for number in range(len(names))],
        "config": {
            "model_config": {"max_model_len": 2000},
            "cache_config": {"enable_prefix_caching": True, "block_size": 16, "kv_cache_layout": "BLHNC"},
        },
    }


def replayed(simulators: Simulators, work: str, specs: dict[str, Any], *cores: dict[str, Any]) -> list[Run]:
    wanted = [Setup(model=stand_in(specs), device=Simulated(specs=specs), **core) for core in cores]
    runs: dict[int, Run] = {}
    for number, outcome in simulators.run(on(build(work, seed=1), wanted)):
        if isinstance(outcome, KvtuneError):
            raise outcome
        runs[number] = outcome
    return [runs[number] for number in range(len(wanted))]


def test_every_class_has_its_row() -> None:
    assert classes() == FIELDS.keys() | REFUSED.keys() | BY_MODELS, "give a new class of spec a row here"


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        *((name, "FullAttentionSpec") for name in FIELDS),
        *(pytest.param(n, n, marks=pytest.mark.full) for n in FIELDS if n not in BESIDE_ONLY),
    ],
)
def test_the_core_hits_what_stock_hits_or_more(name: str, beside: str, simulators: Simulators) -> None:
    specs = captured(beside, name, blocks=600)
    stock, ours = replayed(simulators, ROUNDS, specs, {"core": "stock"}, {"core": "kvtune"})
    hits = [run.table("requests")["hit_tokens"] for run in (stock, ours)]
    assert hits[1].sum() > 0 and (hits[1] >= hits[0]).all()
    assert (hits[1].sum() > hits[0].sum()) == (name in HELPED)
    assert not any("gave up" in note for note in ours.header.notes)


@pytest.mark.parametrize("core", ["stock", "kvtune"])
def test_a_model_whose_engine_vllm_does_not_start_is_refused_by_name(
    core: str, simulators: Simulators
) -> None:
    """vLLM (0.32, 0.33) gives the manager of attention sinks an argument that it does not take."""
    specs = captured("SinkFullAttentionSpec", "SinkFullAttentionSpec", blocks=600)
    with pytest.raises(KvtuneError) as refused:
        replayed(simulators, ROUNDS, specs, {"core": core})
    assert f"vLLM {installed_version()} does not start this model's engine: TypeError: SinkFull" in str(
        refused.value
    )
    assert "another version of vLLM" in refused.value.hint


@pytest.mark.full
@pytest.mark.parametrize("name", FIELDS)
def test_without_its_order_the_core_decides_as_stock_does(name: str, simulators: Simulators) -> None:
    """In a pool that is too small: blocks are evicted, requests wait and are preempted."""
    specs = captured("FullAttentionSpec", name, blocks=280)
    plain = {"pool": False, "pinning": False}
    stock, ours = replayed(
        simulators, TIGHT, specs, {"core": "stock"}, {"core": "kvtune", "core_settings": plain}
    )
    for column in ("hit_tokens", "first_token_s", "finished_s", "preemptions"):
        one, other = (run.table("requests")[column] for run in (stock, ours))
        assert np.array_equal(one, other), column
    assert (
        stock.table("requests")["hit_tokens"].sum() > 0 and stock.table("requests")["preemptions"].sum() > 0
    )
    assert not any("gave up" in note for note in ours.header.notes)


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_does_not_serve_is_refused_in_its_words(name: str, simulators: Simulators) -> None:
    specs = captured("FullAttentionSpec", name, blocks=600)
    for core in ("stock", "kvtune"):
        with pytest.raises(KvtuneError, match=REFUSED[name][1]) as refused:
            replayed(simulators, ROUNDS, specs, {"core": core})
        assert "\n" not in refused.value.message
