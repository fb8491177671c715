"""What vLLM takes on each platform: our table against vLLM's own, asked as on that platform."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtune.errors import UsageError
from kvtune.run.cpu import VARIABLE
from kvtune.vllm.platforms import DEVICES, GIB, Platform, cpu, defaults, device, origins

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # vLLM's own, when it is imported

B200 = Platform("cuda", "NVIDIA B200", 180 * GIB, (10, 0))
T4 = Platform("cuda", "Tesla T4", 15 * GIB, (7, 5))
H200 = Platform("cuda", "NVIDIA H200", 140 * GIB, (9, 0))


@pytest.fixture
def undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vLLM's own answers again after a test that forced others."""
    pytest.importorskip("vllm")
    from kvtune.vllm import cpu_flags
    from kvtune.vllm.as_if import PART
    from kvtune.vllm.patches import PATCHES

    monkeypatch.setenv(VARIABLE, "1")  # so that it is put back
    was = cpu_flags.installed()
    yield
    PATCHES.undo(PART)
    if not was:
        cpu_flags.uninstall()


def test_a_servers_chunk_and_seats_are_a_gpus() -> None:
    assert [batch(DEVICES[name]) for name in ("h100", "a100", "l4")] == [
        (8192, 1024),
        (2048, 256),
        (2048, 256),
    ]
    assert batch(cpu()) == (2048, 128) and batch(cpu(), ranks=2) == (4096, 256)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "platform", [*DEVICES.values(), B200, T4, H200], ids=lambda platform: platform.name.replace(" ", "-")
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_vllms_own_table_says_the_same(platform: Platform, ranks: int, undone: None) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from kvtune.vllm.as_if import decide_as_on

    decide_as_on(platform)
    tokens, sequences = AsyncEngineArgs.get_batch_defaults(ranks)
    server = UsageContext.OPENAI_API_SERVER
    assert (tokens[server], sequences[server]) == batch(platform, ranks)


@pytest.mark.vllm
def test_blocks_are_those_that_vllms_kernels_take(undone: None) -> None:
    from vllm.config.cache import CacheConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    from kvtune.vllm.as_if import decide_as_on

    def multiple() -> int:
        return int(CPUAttentionBackend.get_supported_kernel_block_sizes()[0].base)

    assert multiple() == defaults(cpu())["block_multiple"].value
    decide_as_on(DEVICES["h100"])
    assert multiple() == defaults(DEVICES["h100"])["block_multiple"].value == 16
    assert defaults(DEVICES["h100"])["block_size"].value == CacheConfig.DEFAULT_BLOCK_SIZE


def test_an_unknown_device_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match="--like-device h10: there is no such device") as refused:
        device("h10")
    assert "did you mean h100?" in refused.value.hint and "l4, cpu" in refused.value.hint


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
