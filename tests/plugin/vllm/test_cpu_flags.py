"""KVTUNE_AVX512_BF16 changes what vLLM's CPU platform decides, and not what kernels ask the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.base.cpu import VARIABLE
from kvtune.base.errors import UsageError
from kvtune.plugin.vllm import cpu_flags
from kvtune.plugin.vllm.plugin_state import STATE

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's CPU platform with a decision that records which CPU features it was given."""
    pytest.importorskip("vllm")
    import torch
    from vllm.platforms.cpu import CpuPlatform

    STATE.reset()
    monkeypatch.setattr(
        CpuPlatform,
        "check_and_update_config",
        classmethod(lambda cls, config: setattr(config, "has", torch.cpu._is_avx512_bf16_supported())),
    )
    yield CpuPlatform
    STATE.reset()


@pytest.mark.parametrize(("value", "has"), [("0", False), ("1", True)])
def test_the_platform_sees_the_forced_answer_and_the_kernels_do_not(
    platform: Any, monkeypatch: pytest.MonkeyPatch, value: str, has: bool
) -> None:
    import torch

    real = torch.cpu._is_avx512_bf16_supported
    monkeypatch.setenv(VARIABLE, value)
    cpu_flags.install()
    config = SimpleNamespace()
    platform.check_and_update_config(config)
    assert config.has is has
    assert torch.cpu._is_avx512_bf16_supported is real


def test_without_the_variable_nothing_is_touched(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = vars(platform)["check_and_update_config"]
    cpu_flags.install()
    assert vars(platform)["check_and_update_config"] is before
    assert not STATE.loaded


def test_the_real_cpu_answers_again_after_an_error(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def fails(cls: Any, config: Any) -> None:
        raise ValueError("a flag that vLLM refuses")

    real = torch.cpu._is_avx512_bf16_supported
    monkeypatch.setattr(platform, "check_and_update_config", classmethod(fails))
    monkeypatch.setenv(VARIABLE, "1")
    cpu_flags.install()
    with pytest.raises(ValueError, match="refuses"):
        platform.check_and_update_config(SimpleNamespace())
    assert torch.cpu._is_avx512_bf16_supported is real


def test_an_illegal_value_stops_the_start(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "maybe")
    cpu_flags.install()
    with pytest.raises(UsageError, match=VARIABLE):
        platform.check_and_update_config(SimpleNamespace())
