"""Configuration files: the user's own, up to the repository's root; what others put above changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtune.errors import UsageError
from kvtune.run.config import read_config


@pytest.fixture
def inner(tmp_path: Path) -> Path:
    folder = tmp_path / "outer" / "repository" / "inner"
    folder.mkdir(parents=True)
    return folder


def put(folder: Path, text: str = 'output = "theirs"', name: str = "kvtune.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_file_above_counts(inner: Path) -> None:
    path = put(inner.parent)
    assert read_config(inner).path == path


@pytest.mark.parametrize("name", ["kvtune.toml", "pyproject.toml"])
@pytest.mark.parametrize("text", ['output = "theirs"', "garbage ]["])
def test_another_users_file_is_not_read(
    inner: Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(inner.parent, f"[tool.kvtune]\n{text}" if name == "pyproject.toml" else text, name)
    me = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: me + 1)
    assert read_config(inner).path is None


def test_a_file_in_a_folder_of_others_that_all_may_write_to_is_not_read(
    inner: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(inner.parent)
    inner.parent.chmod(0o777)
    assert read_config(inner).path == path, "the user's own folder"
    taken = inner.parent.stat()
    theirs = os.stat_result((*taken[:4], taken.st_uid + 1, *taken[5:]))
    real = Path.stat
    monkeypatch.setattr(
        Path, "stat", lambda self, **more: theirs if self == inner.parent else real(self, **more)
    )
    assert read_config(inner).path is None


@pytest.mark.parametrize("mark", [".git", "home"])
def test_the_search_ends_at_a_repository_and_at_home(
    inner: Path, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = put(inner.parents[1])
    assert read_config(inner).path == outside
    if mark == "home":
        monkeypatch.setenv("HOME", str(inner.parent))
    else:
        (inner.parent / mark).mkdir()
    assert read_config(inner).path is None
    own = put(inner.parent)
    assert read_config(inner).path == own


@pytest.mark.parametrize(
    "text", ["tool = 3", "x = " + "[" * 5000, "tool = { kvtun = 1 }", "\x00", "[tool.other]"]
)
def test_odd_content_of_pyproject_is_not_kvtunes_affair(inner: Path, text: str) -> None:
    put(inner, text, "pyproject.toml")
    assert read_config(inner).path is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kvtune.toml", "x = " + "[" * 5000),
        ("kvtune.toml", "garbage ]["),
        ("kvtune.toml", "output = 3"),
        ("pyproject.toml", "[tool]\nkvtune = 3"),
    ],
)
def test_what_is_wrong_in_ones_own_file_is_said_in_one_line_that_names_it(
    inner: Path, name: str, text: str
) -> None:
    path = put(inner, text, name)
    with pytest.raises(UsageError) as refused:
        read_config(inner)
    assert str(path) in refused.value.message and "\n" not in refused.value.message


def test_a_pipe_is_no_configuration(inner: Path) -> None:
    os.mkfifo(inner / "kvtune.toml")
    assert read_config(inner).path is None
