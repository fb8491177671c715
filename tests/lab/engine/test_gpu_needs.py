"""What a GPU engine needs of its machine is asked before it starts: driver, C compiler, Python's headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.base.errors import KvtuneError
from kvtune.lab.engine import gpu_needs
from kvtune.lab.engine.faults import hint_for
from kvtune.lab.engine.gpu_needs import check_gpu_needs, lacks
from kvtune.lab.setup.platform import Gpu

H100 = Gpu("NVIDIA H100 80GB HBM3", 81_559, 0, "580.65.06", (9, 0))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPU machine with a new driver, gcc and headers, on which Triton has not compiled anything. Its root."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    (tmp_path / "gcc").touch()
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(gpu_needs.sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setattr(gpu_needs.children, "program", lambda name: (tmp_path / name).exists() or None)
    monkeypatch.setattr(gpu_needs, "cuda_major", lambda: "13")
    monkeypatch.setattr(gpu_needs, "gpus", lambda: [H100])
    return tmp_path


def test_a_machine_that_has_everything_is_accepted(machine: Path) -> None:
    assert not list(lacks([H100]))
    check_gpu_needs(cpu_build=False)


def test_without_a_compiler_an_engine_is_refused_before_it_starts(machine: Path) -> None:
    (machine / "gcc").unlink()
    with pytest.raises(KvtuneError, match=r"no C compiler \(gcc or clang\)") as refused:
        check_gpu_needs(cpu_build=False)
    assert "install gcc" in refused.value.hint
    check_gpu_needs(cpu_build=True)


def test_the_compiler_that_cc_names_counts_alone(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "mycc")
    assert ["CC=mycc" in lack.text for lack in lacks([H100])] == [True]
    (machine / "mycc").touch()
    assert not list(lacks([H100]))


def test_without_pythons_headers_an_engine_is_refused(machine: Path) -> None:
    (machine / "include" / "Python.h").unlink()
    with pytest.raises(KvtuneError, match=r"there is no .*Python\.h") as refused:
        check_gpu_needs(cpu_build=False)
    assert "python3-dev" in refused.value.hint


def test_what_triton_compiled_earlier_serves_without_a_compiler(machine: Path) -> None:
    (machine / "gcc").unlink()
    (machine / "cache" / "ABC").mkdir(parents=True)
    check_gpu_needs(cpu_build=False)
    assert [lack.topic for lack in lacks([H100])] == ["compiler"], "doctor says so nevertheless"


def test_an_old_driver_is_refused(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_needs, "gpus", lambda: [Gpu("NVIDIA L4", 23_034, 0, "570.133.20", (8, 9))])
    with pytest.raises(KvtuneError, match=r"driver 570\.133\.20 is too old for CUDA 13.*580 or newer"):
        check_gpu_needs(cpu_build=False)


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("RuntimeError: Failed to find C compiler. Please specify via CC", "install gcc"),
        ("main.c:5:10: fatal error: Python.h: No such file or directory", "python3-dev"),
        ("RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region", "--shm-size"),
    ],
)
def test_what_the_engine_died_of_is_explained(message: str, hint: str) -> None:
    assert hint in hint_for(message, "engine.log")
