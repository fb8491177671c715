"""A small /dev/shm is reported before an engine starts, and only where the engine needs it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtune.base.errors import EXIT_USAGE, KvtuneError
from kvtune.lab.engine import gpu_needs
from kvtune.lab.engine.gpu_needs import NEEDED_BYTES, check_shared_memory

TWO, TIER = ["--tensor-parallel-size", "2"], ["--kv-offloading-size", "4"]


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(gpu_needs.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))


@pytest.mark.parametrize("free", [64 << 20, 0, NEEDED_BYTES - 1])
@pytest.mark.parametrize(
    ("words", "cpu_build"), [([], True), (TIER, True), (TWO, False), (["-pp", "2"], False)]
)
def test_a_small_dev_shm_is_refused_with_a_hint(
    free: int, words: list[str], cpu_build: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, free)
    with pytest.raises(KvtuneError, match="240 MiB for its message queues") as raised:
        check_shared_memory(words, cpu_build=cpu_build)
    assert f"{free >> 20} MiB free" in raised.value.message and "--shm-size=2g" in raised.value.hint
    assert raised.value.exit_code == EXIT_USAGE
    check_shared_memory([], cpu_build=False)  # on one GPU the worker runs inside EngineCore


@pytest.mark.parametrize("words", [TIER, [*TIER, *TWO]])
def test_a_tier_larger_than_dev_shm_is_refused_on_a_gpu_only(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_free(monkeypatch, (4 << 30) - 1)
    with pytest.raises(KvtuneError, match="--kv-offloading-size 4 is a file there on a GPU") as raised:
        check_shared_memory(words, cpu_build=False)
    assert "a smaller tier" in raised.value.hint and "--ipc=host" in raised.value.hint
    check_shared_memory(TIER, cpu_build=True)  # the CPU's tier is memory of EngineCore
    with_free(monkeypatch, (4 << 30) + NEEDED_BYTES)
    check_shared_memory(words, cpu_build=False)


def test_a_machine_without_dev_shm_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_needs, "FOLDER", tmp_path / "none")
    with pytest.raises(KvtuneError, match="0 MiB free"):
        check_shared_memory([], cpu_build=True)


def test_a_large_enough_dev_shm_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    with_free(monkeypatch, NEEDED_BYTES)
    check_shared_memory([], cpu_build=True)
