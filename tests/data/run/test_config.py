"""Configuration files: the user's own, up to the repository's root; what others put above changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtune.base.bounded import MOST_TOML
from kvtune.data.run.config import Config, read_config


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


DIGITS = "9" * 5000
MISTAKES = {
    "table": ("pyproject.toml", "[tool]\nkvtune = 3"),
    "size": ("kvtune.toml", "#" * MOST_TOML + "\n"),
    "size of pyproject": ("pyproject.toml", "[tool.kvtune]\n" + "#" * MOST_TOML),
    "NUL": ("kvtune.toml", 'output = "a\\u0000b"'),
    "line": ("kvtune.toml", 'output = "a\\nkvtune: all is well"'),
    "nobody's home": ("kvtune.toml", 'output = "~nosuchuser/x"'),
    "long name": ("kvtune.toml", f'output = "{"a" * 300}"'),
    "long path": ("kvtune.toml", f'output = "{"a/" * 3000}"'),
    "slo": ("kvtune.toml", 'slo = "ttft=soon"'),
    "names": ("kvtune.toml", "\n".join(f"name{number} = 1" for number in range(10_000))),
    "long key": ("kvtune.toml", "n" * 100_000 + " = 1"),
}


@pytest.mark.parametrize(("name", "text"), MISTAKES.values(), ids=MISTAKES)
def test_what_is_wrong_in_ones_own_file_is_one_line_that_names_it(inner: Path, name: str, text: str) -> None:
    path = inner / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    config = read_config(inner)
    assert config.problem.startswith(f"{path}: ") and config.problem.isprintable()
    assert len(config.problem) < 1000 and "left out" in config.problem
    assert (config.path, dict(config.values), config.output) == (path, {}, None)


def test_what_is_right_in_the_same_file_counts(inner: Path) -> None:
    put(inner, 'outptu = "x"\noutput = "mine"\nopen = 3\nquiet = true')
    config = read_config(inner)
    assert config.values == {"output": "mine", "quiet": True}
    assert (
        "kvtune has no setting outptu (did you mean output?" in config.problem
        and "open = 3" in config.problem
    )


def test_only_the_beginning_of_a_huge_file_is_read(inner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyproject.toml", "kvtune.toml"):
        os.truncate(put(inner, "", name), 3 << 30)
        assert read_config(inner).path == (inner / name if name == "kvtune.toml" else None)


def test_a_current_folder_that_was_removed_has_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert read_config() == Config()


def test_a_user_without_a_home_folder_has_settings(inner: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    path = put(inner)
    monkeypatch.setattr(Path, "home", nowhere)
    assert read_config(inner).path == path and read_config(inner.parent).path is None
