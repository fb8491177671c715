"""An engine that cannot be simulated is refused at once; a device's memory sizes the pool as vLLM does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.errors import UsageError
from kvtune.fake_device.blocks import give_pool
from kvtune.sim import pool
from kvtune.sim.pool import sized
from kvtune.sim.settings import SimSettings
from kvtune.vllm.platforms import GIB, MIB, Platform


def engine(*flags: str, model: str = "gemma-3-4b", **more: Any) -> SimSettings:
    return SimSettings(model=model, engine_args=list(flags), **more)


def test_a_pool_that_nothing_sizes_is_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="how large is its KV cache") as refused:
        sized(engine(like_device="cpu"))
    assert "--like-device 80GiB" in refused.value.hint
    for given in (
        engine("--num-gpu-blocks-override", "9"),
        engine(model="tiny-llama"),
        engine(specs={"layers": {}}),
    ):
        assert sized(given) == given
    monkeypatch.setattr(pool, "engines", lambda key: Platform("cuda", "one that nvidia-smi lists", 24 * GIB))
    assert sized(engine()).memory_bytes == 24 * GIB


def test_a_devices_memory_is_named_or_known() -> None:
    assert sized(engine(like_device="80GiB")).memory_bytes == 80 * GIB
    assert sized(engine(like_device="h100")).memory_bytes == 81_559 * MIB
    with pytest.raises(UsageError, match="--like-device 80: there is no such device") as refused:
        sized(engine(like_device="80"))
    assert "for instance 80GiB" in refused.value.hint


@pytest.mark.parametrize("flag", [["--data-parallel-size", "2"], ["-dp=2"], ["--data_parallel_size=2"]])
def test_several_engines_are_refused_with_a_reason(flag: list[str]) -> None:
    with pytest.raises(UsageError, match="a replay has one engine"):
        sized(engine(*flag, "--num-gpu-blocks-override", "9"))
    assert sized(engine("-dp", "1", "--num-gpu-blocks-override", "9"))


def config(*, ranks: int = 1, **cache: int | None) -> Any:
    given = {"kv_cache_memory_bytes": None, "num_gpu_blocks_override": None, **cache}
    return SimpleNamespace(
        cache_config=SimpleNamespace(gpu_memory_utilization=0.5, **given),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=1),
    )


def test_the_pool_is_what_the_weights_leave_of_the_share_that_vllm_uses() -> None:
    for ranks, left in ((1, 30), (2, 35)):
        asked = config(ranks=ranks)
        give_pool(asked, 80 * GIB, 10 * GIB)
        assert asked.cache_config.kv_cache_memory_bytes == left * GIB
    flagged = config(num_gpu_blocks_override=7)
    give_pool(flagged, 80 * GIB, 10 * GIB)
    assert flagged.cache_config.kv_cache_memory_bytes is None
    with pytest.raises(UsageError, match="the weights take 50 GiB, and vLLM uses 40 GiB"):
        give_pool(config(), 80 * GIB, 50 * GIB)
    for weights, device, ranks in ((50, 101, 2), (80, 161, 4), (81, 163, 4)):
        with pytest.raises(UsageError) as refused:
            give_pool(config(), 80 * GIB, weights * GIB)
        assert f"--like-device {device}GiB or more" in refused.value.hint
        assert f"`-- --tensor-parallel-size {ranks}`" in refused.value.hint
        give_pool(config(), device * GIB, weights * GIB)
        give_pool(config(ranks=ranks), 80 * GIB, weights * GIB)
