"""An engine that cannot be simulated is refused at once; a device's memory sizes the pool as vLLM does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.base.errors import UsageError
from kvtune.data.platforms import GIB, MIB, Platform, device
from kvtune.lab.device.blocks import Stage, give_pool
from kvtune.lab.setup import platform
from kvtune.lab.setup.setup import Setup, Simulated


def engine(*flags: str, model: str = "gemma-3-4b", **more: Any) -> Setup:
    return Setup(model=model, engine_args=list(flags), **more)


def test_a_pool_that_nothing_sizes_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="how large is its KV cache") as refused:
        engine(platform=device("cpu")).sized()
    assert "--like-device 80GiB" in refused.value.hint
    for given in (
        engine("--num-gpu-blocks-override", "9"),
        engine(model="tiny-llama"),
        engine(device=Simulated(specs={"layers": {}})),
    ):
        assert given.sized() == given.replayed()
    monkeypatch.setattr(platform, "here", lambda: Platform("cuda", "one that nvidia-smi lists", 24 * GIB))
    assert engine().sized().pool.memory_bytes == 24 * GIB


def test_a_devices_memory_is_named_or_known() -> None:
    assert engine(platform=device("80GiB")).sized().pool.memory_bytes == 80 * GIB
    assert engine(platform=device("h100")).sized().pool.memory_bytes == 81_559 * MIB
    with pytest.raises(UsageError, match="--like-device 80: there is no such device") as refused:
        device("80")
    assert "for instance 80GiB" in refused.value.hint


@pytest.mark.parametrize("flag", [["--data-parallel-size", "2"], ["-dp=2"], ["--data_parallel_size=2"]])
def test_several_engines_are_refused_with_a_reason(flag: list[str]) -> None:
    with pytest.raises(UsageError, match="a replay has one engine"):
        engine(*flag, "--num-gpu-blocks-override", "9").sized()
    assert engine("-dp", "1", "--num-gpu-blocks-override", "9").sized()


def stages(*gib: int) -> list[Stage]:
    return [Stage({}, weight_bytes=each * GIB) for each in gib]


def config(*, ranks: int = 1, **cache: int | None) -> Any:
    given = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": None, **cache}
    return SimpleNamespace(
        cache_config=SimpleNamespace(gpu_memory_utilization=0.5, **given),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )


def test_the_pool_is_what_the_weights_leave_of_the_share_that_vllm_uses() -> None:
    asked = config()
    assert [stage.spare_bytes for stage in give_pool(asked, 80 * GIB, stages(10))] == [0]
    assert asked.cache_config.kv_cache_memory_bytes == 30 * GIB
    pipeline = config()
    assert [stage.spare_bytes for stage in give_pool(pipeline, 80 * GIB, stages(4, 10))] == [6 * GIB, 0]
    assert pipeline.cache_config.kv_cache_memory_bytes == 30 * GIB
    flagged = config(num_gpu_blocks_override=7)
    give_pool(flagged, 80 * GIB, stages(10))
    assert flagged.cache_config.kv_cache_memory_bytes is None
    with pytest.raises(UsageError, match="the weights take 50 GiB, and vLLM uses 40 GiB"):
        give_pool(config(), 80 * GIB, stages(50))
    for weights, gib, ranks in ((50, 101, 2), (80, 161, 4), (81, 163, 4)):
        with pytest.raises(UsageError) as refused:
            give_pool(config(), 80 * GIB, stages(weights))
        assert f"--like-device {gib}GiB or more" in refused.value.hint
        assert f"`-- --tensor-parallel-size {ranks}`" in refused.value.hint
        give_pool(config(), gib * GIB, stages(weights))
        give_pool(config(ranks=ranks), 80 * GIB, stages(weights // ranks))
