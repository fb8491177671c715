"""Preparing the model with real weights: refusals, and no partial folder is left. No torch here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import EXIT_USAGE, KvtuneError, UsageError
from kvtune.lab.setup import gemma
from kvtune.lab.setup.resolve import resolve
from tests.simulator import run


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemma, "find_spec", lambda name: object())


def converter(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Run `code` (with the folder as argument) where the conversion would run."""
    real = subprocess.run

    def stand_in(command: list[str], **options: Any) -> Any:
        return real([sys.executable, "-c", code, command[-1]], **options)

    monkeypatch.setattr(gemma.children.subprocess, "run", stand_in)


WRITES = (
    "import pathlib, sys; f = pathlib.Path(sys.argv[1]);"
    "(f / 'model.safetensors').write_text('w'); (f / 'config.json').write_text('{}')"
)


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemma, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(KvtuneError, match="not installed: gguf") as caught:
        gemma.prepare(tmp_path / "g")
    assert "kvtune[gemma]" in caught.value.hint and caught.value.exit_code == EXIT_USAGE


@pytest.mark.usefixtures("installed")
def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converter(monkeypatch, WRITES + "; raise SystemExit('sha256 is wrong')")
    with pytest.raises(KvtuneError, match="sha256 is wrong"):
        gemma.prepare(tmp_path / "g")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("installed")
def test_the_folder_appears_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converter(monkeypatch, WRITES)
    gemma.prepare(tmp_path / "g")
    assert gemma.is_prepared(tmp_path / "g")
    assert [p.name for p in tmp_path.iterdir()] == ["g"]


@pytest.mark.usefixtures("installed")
def test_what_is_there_is_ready_or_refused_and_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    converter(monkeypatch, WRITES)
    made, mine, link = (tmp_path / name for name in ("g", "mine", "link"))
    for _ in range(2):
        assert run(["prepare", "-o", str(made)]) == 0 and "is ready" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["g"]
    mine.mkdir()
    link.symlink_to(mine)
    for folder in (mine, link):
        assert run(["prepare", "-o", str(folder)]) == EXIT_USAGE
    assert list(mine.iterdir()) == [] and link.is_symlink()


@pytest.mark.usefixtures("installed")
def test_too_little_disk_space_is_reported_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemma, "NEEDED_BYTES", 1 << 60)
    with pytest.raises(KvtuneError, match="MiB free"):
        gemma.prepare(tmp_path / "g")
    assert list(tmp_path.iterdir()) == []


def test_the_name_is_a_model_once_it_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="not prepared") as caught:
        resolve(gemma.NAME, dummy=False, engine_args=[])
    assert caught.value.hint.endswith("kvtune prepare gemma3-270m")
    folder = gemma.default_folder()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["Gemma3ForCausalLM"]}')
    (folder / "model.safetensors").write_bytes(b"x")
    assert str(folder) in resolve(gemma.NAME, dummy=False, engine_args=[]).args


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gemma9"], "not a model"),
        (["-o", "FULL"], "exists"),
        (["-o", "FULL/notes"], "exists"),
    ],
)
def test_what_prepare_refuses(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").write_text("mine")
    assert run(["prepare", *(a.replace("FULL", str(tmp_path)) for a in arguments)]) == EXIT_USAGE
    assert says in capsys.readouterr().err and (tmp_path / "notes").exists()
