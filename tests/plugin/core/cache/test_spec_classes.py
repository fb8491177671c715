"""Every class of vLLM's KV specs, beside full attention: the core hits what stock hits, with windows more."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
    from vllm.v1.kv_cache_interface import KVCacheSpec

    from bench import audit
    from kvtune.plugin.core import state
    from kvtune.plugin.core.breaker import breaker_of
    from kvtune.plugin.core.cache.windows import SPECS, KeepingWindowManager
    from kvtune.plugin.core.settings import parse
    from kvtune.plugin.core.steps import scheduler as steps
    from tests.plugin.core.pool_rig import SETTINGS, Engine, random_steps, tokens
    from tests.plugin.core.steady_rig import Shape

pytestmark = pytest.mark.vllm


def spec(name: str, **fields: Any) -> Any:
    heads = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
    return lambda: getattr(interface, name)(**{"block_size": 4, **heads, **fields})


def states() -> KVCacheSpec:
    return interface.MambaSpec(
        block_size=4, shapes=((2,),), dtypes=(torch.float32,), mamba_type="mamba2", mamba_cache_mode="align"
    )


GROUPS: dict[str, Callable[[], KVCacheSpec]] = {
    "FullAttentionSpec": spec("FullAttentionSpec"),
    "MLAAttentionSpec": spec("MLAAttentionSpec"),
    "HiddenStateCacheSpec": spec("HiddenStateCacheSpec"),
    "RSWASpec": spec("RSWASpec", rswa_window=12),
    "ChunkedLocalAttentionSpec": spec("ChunkedLocalAttentionSpec", attention_chunk_size=16),
    "SlidingWindowSpec": spec("SlidingWindowSpec", sliding_window=12),
    "SlidingWindowMLASpec": spec("SlidingWindowMLASpec", sliding_window=12),
    "CircularBufferSpec": spec("CircularBufferSpec", block_size=2),
    "MambaSpec": states,
}
"""A group of each class that may stand beside full attention in one pool."""
OTHERS = {
    "KVCacheSpec": "abstract",
    "AttentionSpec": "abstract",
    "UniformTypeKVCacheSpecs": "the scheduler gets its first layer's spec",
    "EncoderOnlyAttentionSpec": "has no KV cache: vLLM makes no group of it",
    "CrossAttentionSpec": "an encoder's: vLLM turns prefix caching off",
    "SinkFullAttentionSpec": "vLLM 0.32 cannot build its manager: it does not take needs_kv_cache_zeroing",
    "HiSparseHotSpec": "has pools of another class, test_adopt.py",
    "HiSparseResidentSpec": "has pools of another class, test_adopt.py",
}


def classes(of: type[KVCacheSpec] = KVCacheSpec) -> set[str]:
    return {of.__name__}.union(*(classes(one) for one in of.__subclasses__()))


def test_every_class_of_this_vllm_is_in_a_table() -> None:
    """A class that is new: say in one of the tables above what the core does with it."""
    mine = {name for name in classes() if hasattr(interface, name)}
    assert mine == set(GROUPS) | set(OTHERS)


def hits(shape: Shape, core: bool) -> tuple[list[int], Engine]:
    """The hit tokens of prompts of which each shares a prefix and is sent twice, before a random load."""
    settings = parse(SETTINGS["first"]) if core else None
    engine = Engine(shape, settings)
    if settings is not None:
        steps.adopt(engine.scheduler, settings)
    found = [
        engine.serve(tokens(seed, 60) + tokens(90 + turn // 2, 9)) for turn in range(4) for seed in range(3)
    ]
    random_steps(engine, 5, 150, lambda: None)
    engine.drain()
    assert audit.check(engine.scheduler) == []
    return found, engine


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_of_each_class(name: str) -> None:
    one = GROUPS[name]()
    shape = Shape(states=2, blocks=400) if name == "MambaSpec" else Shape(more=(one, one), blocks=400)
    stock, _ = hits(shape, core=False)
    ours, engine = hits(shape, core=True)
    assert all(a >= b for a, b in zip(ours, stock, strict=True)) and sum(stock)
    assert not breaker_of(engine.scheduler.kv_cache_manager).tripped
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[1:]
    keeps = {type(manager) is KeepingWindowManager for manager in managers}
    assert keeps == {name in SPECS}
    if name not in SPECS:
        assert ours == stock


BOUNDED = spec("SlidingWindowMLASpec", sliding_window=12, bounded_replay=True)


@pytest.mark.parametrize("block", [2, 4])
def test_windows_that_vllm_never_hits_stay_stocks(block: int) -> None:
    """DeepSeek V4.1: windows of bounded replay have no hashes, and smaller blocks than a hash covers."""
    bounded = replace(BOUNDED(), block_size=block)
    shape = Shape(more=(bounded, bounded, GROUPS["CircularBufferSpec"]()), blocks=900)
    stock, _ = hits(shape, core=False)
    ours, engine = hits(shape, core=True)
    assert ours == stock and sum(stock)
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert {type(one) for one in managers if isinstance(one, SlidingWindowManager)} == {SlidingWindowManager}
    assert not state.state()["parts"]["pinning"]
    (note,) = (note for note in state.state()["notes"] if note.startswith("pinning: windows"))
    assert note == (
        "pinning: windows of 12 tokens stay as vLLM keeps them: vLLM caches no window of this SlidingWindowMLASpec"
    )


def test_windows_of_a_class_that_the_core_does_not_know_stay_stocks() -> None:
    """As a plugin may register one: vLLM's own manager keeps its rules."""
    from vllm.v1.core.single_type_kv_cache_manager import KVCacheSpecRegistry

    class NewWindowSpec(interface.SlidingWindowSpec):
        pass

    KVCacheSpecRegistry.register(
        NewWindowSpec, SlidingWindowManager, uniform_type_base_spec=interface.SlidingWindowSpec
    )
    new = NewWindowSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=12)
    known = GROUPS["SlidingWindowSpec"]()
    shape = Shape(more=(new, known), blocks=400)
    stock, _ = hits(shape, core=False)
    ours, engine = hits(shape, core=True)
    assert all(a >= b for a, b in zip(ours, stock, strict=True))
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[1:]
    assert [type(one) for one in managers] == [SlidingWindowManager, KeepingWindowManager]
    assert any("does not know windows of NewWindowSpec" in note for note in state.state()["notes"])
