"""The journal from which an interrupted command resumes: what it takes for its own, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.errors import UsageError
from kvtune.run.rows import add_row, read_rows

FIELDS = ("key", "path")


def row(number: int) -> dict[str, object]:
    return {"key": f"{number}", "path": "a.kvrun"}


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_row_after_a_crash_at_any_byte_is_read_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.jsonl"
    for number in range(2):
        add_row(path, row(number))
    path.write_bytes(path.read_bytes()[:-cut])
    before = read_rows(path, FIELDS)
    add_row(path, row(2))
    assert read_rows(path, FIELDS) == [*before, row(2)]


@pytest.mark.parametrize("text", ["mine\n", '{"mine": 1}\n', "mine", '["key"]'])
def test_a_file_of_somebody_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="not a journal that kvtune wrote"):
        read_rows(path, FIELDS)
    assert path.read_text() == text


def test_a_link_is_neither_read_nor_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.symlink_to(tmp_path / "kept")
    with pytest.raises(UsageError, match="not a journal"):
        read_rows(path, FIELDS)
    with pytest.raises(OSError, match="symbolic link"):
        add_row(path, row(0))
    assert not (tmp_path / "kept").exists()
