"""CPU features come from the kernel, or from the variable that overrides it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.base import cpu
from kvtune.base.cpu import VARIABLE, avx512_bf16
from kvtune.base.errors import UsageError
from kvtune.data.run.machine import this_host

GENOA = "processor\t: 0\nmodel name\t: AMD EPYC 9654\nflags\t\t: fpu avx512f avx512_bf16 sse\n\n"
ROME = "processor\t: 0\nmodel name\t: AMD EPYC 7742\nflags\t\t: fpu avx2 sse\n\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16\n"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A stand-in for the kernel's file, with the variable unset."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    return tmp_path / "cpuinfo"


@pytest.mark.parametrize(("text", "has"), [(GENOA, True), (ROME, False), (ARM, False), ("", False)])
def test_the_kernels_cpu_flags_decide(asked: Path, text: str, has: bool) -> None:
    asked.write_text(text)
    assert avx512_bf16() is has
    assert this_host().avx512_bf16 is has


def test_a_machine_without_cpu_flags_has_no_bf16(asked: Path) -> None:
    assert not asked.exists()
    assert avx512_bf16() is False


@pytest.mark.parametrize(("value", "has"), [("0", False), ("1", True)])
def test_the_variable_overrides_the_cpu(
    asked: Path, monkeypatch: pytest.MonkeyPatch, value: str, has: bool
) -> None:
    asked.write_text(ROME if has else GENOA)
    monkeypatch.setenv(VARIABLE, value)
    assert avx512_bf16() is has


def test_other_values_of_the_variable_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(UsageError, match=VARIABLE):
        avx512_bf16()
