"""A small /dev/shm is reported before an engine starts, and only where the engine needs it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtune.engine import shared_memory
from kvtune.engine.shared_memory import NEEDED_BYTES, check_shared_memory
from kvtune.errors import EXIT_USAGE, KvtuneError


@pytest.mark.parametrize("free", [64 << 20, 0, NEEDED_BYTES - 1])
def test_a_small_dev_shm_is_refused_with_a_hint(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    with pytest.raises(KvtuneError) as raised:
        check_shared_memory(True)
    assert f"{free >> 20} MiB free" in raised.value.message and "--shm-size" in raised.value.hint
    assert raised.value.exit_code == EXIT_USAGE
    check_shared_memory(False)  # a GPU engine's worker runs inside EngineCore


def test_a_machine_without_dev_shm_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path / "none")
    with pytest.raises(KvtuneError, match="0 MiB free"):
        check_shared_memory(True)


def test_a_large_enough_dev_shm_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda path: SimpleNamespace(free=NEEDED_BYTES))
    check_shared_memory(True)
