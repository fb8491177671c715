"""Host memory as a second tier of a CPU engine: which spec its configuration names, which bytes are copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.plugin.vllm.plugin_state import STATE

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def config_class() -> Any:
    """VllmConfig as it is without the patch."""
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig

    return VllmConfig


def configured(config_class: Any, size: float | None, **extra: str) -> Any:
    config = SimpleNamespace(
        cache_config=SimpleNamespace(kv_offloading_size=size, kv_offloading_backend="native"),
        kv_transfer_config=SimpleNamespace(kv_connector=None, kv_connector_extra_config=dict(extra)),
    )
    config_class._post_init_kv_transfer_config(config)
    return config.kv_transfer_config


def test_a_cpu_engine_that_offloads_gets_a_spec_that_needs_no_gpu(config_class: Any) -> None:
    from kvtune.plugin.core.cpu_tier import install as cpu_tier

    assert "spec_name" not in configured(config_class, 0.5).kv_connector_extra_config
    cpu_tier.install()
    cpu_tier.install()
    extra = configured(config_class, 0.5).kv_connector_extra_config
    assert extra["spec_name"] == "MemcpyOffloadingSpec" and extra["cpu_bytes_to_use"] == 1 << 29
    assert configured(config_class, None).kv_connector_extra_config == {}
    mine = configured(config_class, 0.5, spec_name="Mine", spec_module_path="mine")
    assert mine.kv_connector_extra_config["spec_module_path"] == "mine"


def test_other_platforms_keep_vllms_spec(config_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import platforms

    from kvtune.plugin.core.cpu_tier import install as cpu_tier

    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    cpu_tier.install()
    for policy in ("lru", "arc"):
        extra = configured(config_class, 0.5, eviction_policy=policy).kv_connector_extra_config
        assert extra.keys() == {"cpu_bytes_to_use", "eviction_policy"}


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_connector_without_settings_is_none_that_fails(
    config_class: Any, monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    from vllm import platforms

    from kvtune.plugin.core.cpu_tier import install as cpu_tier

    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    transfer = SimpleNamespace(kv_connector="OffloadingConnector", kv_connector_extra_config=None)
    cpu_tier._configured(SimpleNamespace(kv_transfer_config=transfer))
    extra = transfer.kv_connector_extra_config
    assert (extra or {}).get("spec_name") == ("MemcpyOffloadingSpec" if on_cpu else None)


def test_an_error_of_the_patch_leaves_vllms_spec(config_class: Any, caplog: pytest.LogCaptureFixture) -> None:
    from kvtune.plugin.core.cpu_tier import install as cpu_tier

    cpu_tier._configured(
        SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector="OffloadingConnector"))
    )
    assert "vLLM's own spec of a tier of host memory stays" in caplog.text


def test_a_vllm_without_the_class_keeps_its_spec(config_class: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm.config

    from kvtune.plugin.core.cpu_tier import install as cpu_tier

    monkeypatch.delattr(vllm.config, "VllmConfig")
    cpu_tier.install()
    assert not STATE.loaded


BLOCKS, CHUNKS = 12, 8


@given(st.data())
def test_blocks_come_back_as_they_went_whatever_a_chunk_holds(data: st.DataObject) -> None:
    import torch
    from vllm.v1.kv_offload.base import (
        BlockIDsLoadStoreSpec,
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        CanonicalKVCacheTensor,
        GPULoadStoreSpec,
    )

    from kvtune.plugin.core.cpu_tier.memcpy import MemcpyWorker

    class Chunks(BlockIDsLoadStoreSpec):  # type: ignore[misc]
        """Chunks of the tier."""

    per_chunk = data.draw(st.integers(1, 3))
    pages = (8, 6)  # of the second tensor's pages 4 bytes are padding
    cache = [torch.randint(-128, 127, (BLOCKS, page), dtype=torch.int8) for page in (8, 10)]
    before = [tensor.clone() for tensor in cache]
    refs = [[CanonicalKVCacheRef(number, page)] for number, page in enumerate(pages)]
    tensors = [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in cache]
    worker = MemcpyWorker(CanonicalKVCaches(tensors, refs), per_chunk, CHUNKS)
    ids = data.draw(st.permutations(range(1, BLOCKS)))
    sizes = [data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4))]
    firsts = [data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5))]
    blocks = GPULoadStoreSpec(ids[: sum(sizes)], group_sizes=sizes, block_indices=firsts)
    used = sum(
        -(-(size + first % per_chunk) // per_chunk) for size, first in zip(sizes, firsts, strict=True) if size
    )
    chunks = Chunks(data.draw(st.permutations(range(CHUNKS)))[:used]) if used <= CHUNKS else None
    if chunks is None:
        return
    assert worker.submit_store(1, blocks, chunks)
    for tensor in cache:
        tensor.zero_()
    assert worker.submit_load(2, chunks, blocks)
    stored = dict(enumerate((ids[: sizes[0]], ids[sizes[0] : sum(sizes)])))
    for number, page in enumerate(pages):
        for block in range(BLOCKS):
            expected = (
                before[number][block].clone()
                if block in stored[number]
                else torch.zeros_like(before[number][block])
            )
            expected[page:] = 0
            assert torch.equal(cache[number][block], expected)
    done = worker.get_finished()
    assert [one.job_id for one in done] == [1, 2] and worker.get_finished() == []
    assert {one.transfer_size for one in done} == {sum(n * p for n, p in zip(sizes, pages, strict=True))}
