"""Files are written whole or not at all, whatever stops the writer."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.errors import KvtuneError
from kvtune.files import explained, replacing


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with replacing(target) as part:
        part.write_text("new")
        assert target.read_text() == "old"
        assert part.parent == target.parent, "a rename across file systems would be a copy"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "new")]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError(), KeyboardInterrupt()])
def test_a_writer_that_is_stopped_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: BaseException
) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")
    with pytest.raises(type(error)), replacing(target) as part:
        part.write_text("half")
        raise error
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.json", "old")]


def test_a_rename_that_fails_leaves_no_temporary_file(tmp_path: Path) -> None:
    folder = tmp_path / "a.json"
    folder.mkdir()
    with pytest.raises(OSError), replacing(folder) as part:
        part.write_text("new")
    assert list(tmp_path.iterdir()) == [folder]


def test_the_error_names_the_file_and_the_reason(tmp_path: Path) -> None:
    target = tmp_path / "no folder" / "a.toml"
    with (
        pytest.raises(KvtuneError, match=r"cannot write the recipe .*a\.toml: No such file") as caught,
        explained(target, "choose another place", "the recipe"),
        replacing(target) as part,
    ):
        part.write_text("new")
    assert caught.value.hint == "choose another place"
    with pytest.raises(KvtuneError, match=f"cannot write {target}: No such file"), explained(target, "hint"):
        target.write_text("new")


def test_errors_of_other_kinds_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mine"), explained(tmp_path, "hint"):
        raise ValueError("mine")
