"""What vLLM takes on each platform: our table against vLLM's own, asked as on that platform."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtune.base.errors import UsageError
from kvtune.data.platforms import DEVICES, GIB, Platform, cpu, defaults, device, origins

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own, when it is imported

T4 = Platform("cuda", "Tesla T4", 15 * GIB, (7, 5))


def test_a_servers_chunk_and_seats_are_a_gpus() -> None:
    assert [batch(DEVICES[name]) for name in ("h100", "a100", "l4")] == [
        (8192, 1024),
        (2048, 256),
        (2048, 256),
    ]
    assert batch(cpu()) == (2048, 128) and batch(cpu(), ranks=2) == (4096, 256)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "platform", [*DEVICES.values(), T4], ids=lambda platform: platform.name.replace(" ", "-")
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_vllms_own_table_says_the_same(
    platform: Platform, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    from vllm.usage.usage_lib import UsageContext

    told = SimpleNamespace(
        get_device_total_memory=lambda *_: platform.memory_bytes,
        get_device_name=lambda *_: platform.name,
        is_device_capability=lambda capability, *_: tuple(capability) == platform.capability,
        is_tpu=lambda: False,
        is_cpu=lambda: platform.kind == "cpu",
    )
    monkeypatch.setattr(arg_utils, "current_platform", told)
    tokens, sequences = arg_utils.AsyncEngineArgs.get_batch_defaults(ranks)
    server = UsageContext.OPENAI_API_SERVER
    assert (tokens[server], sequences[server]) == batch(platform, ranks)


@pytest.mark.vllm
def test_default_blocks_are_those_of_vllm() -> None:
    cache = pytest.importorskip("vllm.config.cache")
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert defaults(DEVICES["h100"])["block_size"].value == cache.CacheConfig.DEFAULT_BLOCK_SIZE
    multiple = CPUAttentionBackend.get_supported_kernel_block_sizes()[0].base
    assert multiple == defaults(cpu())["block_multiple"].value


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="--like-device h10: there is no such device") as refused:
        device("h10")
    assert "did you mean h100?" in refused.value.hint and "l4, 3090" in refused.value.hint


def test_the_source_of_each_value_is_the_flag_the_recipe_or_vllms_default_for_the_device() -> None:
    said = origins(frozenset({"block-size", "max-num-seqs"}), frozenset({"max_num_seqs"}), "NVIDIA L4")
    assert said == {
        "max_num_batched_tokens": "vLLM's default for NVIDIA L4",
        "max_num_seqs": "recipe",
        "block_size": "flag",
    }


def batch(platform: Platform, ranks: int = 1) -> tuple[int, int]:
    taken = defaults(platform, ranks)
    return int(taken["max_num_batched_tokens"].value), int(taken["max_num_seqs"].value)
