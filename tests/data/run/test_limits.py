"""A container's limits are read from its control group, version 1 or 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.data.run import limits
from kvtune.data.run.limits import cpu_limit, memory_limit_bytes, memory_used_bytes


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    for name in ("cpu", "memory"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "cores"), [("200000 100000", 2), ("150000 100000", 2), ("1000 100000", 1), ("max 100000", None)]
)
def test_limits_of_control_groups_version_2(group: Path, quota: str, cores: int | None) -> None:
    (group / "cpu.max").write_text(quota + "\n")
    (group / "memory.max").write_text("8589934592\n")
    (group / "memory.current").write_text("1024\n")
    assert (cpu_limit(), memory_limit_bytes(), memory_used_bytes()) == (cores, 8 << 30, 1024)


def test_limits_of_control_groups_version_1(group: Path) -> None:
    (group / "cpu/cpu.cfs_quota_us").write_text("400000\n")
    (group / "cpu/cpu.cfs_period_us").write_text("100000\n")
    (group / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (group / "memory/memory.usage_in_bytes").write_text("77\n")
    assert (cpu_limit(), memory_limit_bytes(), memory_used_bytes()) == (4, None, 77)
    (group / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert cpu_limit() is None


def test_a_machine_without_control_groups_has_no_limit(group: Path) -> None:
    assert (cpu_limit(), memory_limit_bytes(), memory_used_bytes()) == (None, None, 0)


def test_a_containers_limit_counts_as_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "memory_limit_bytes", lambda: 5 << 20)
    monkeypatch.setattr(limits, "memory_used_bytes", lambda: 4 << 20)
    assert limits.free_memory_bytes() == 1 << 20
