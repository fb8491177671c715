"""A temp folder whose path is too long for a Unix socket is no place for vLLM's sockets; a short one stays as it is."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest

from kvtune.engine import sockets
from kvtune.engine.sockets import LONGEST, VARIABLE, socket_variables


def folder_of(parent: Path, length: int) -> Path:
    """A folder whose path has so many characters."""
    folder = parent / ("x" * (length - len(str(parent)) - 1))
    folder.mkdir()
    assert len(str(folder)) == length
    return folder


def test_the_longest_folder_that_is_left_alone_takes_a_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as parent:
        for length, fits in ((LONGEST, True), (LONGEST + 1, False)):
            folder = folder_of(Path(parent), length)
            monkeypatch.setattr(tempfile, "tempdir", str(folder))
            assert (socket_variables({}) == {}) is fits
            with socket.socket(socket.AF_UNIX) as made:
                path = str(folder / str(uuid4()))
                if fits:
                    made.bind(path)
                else:
                    with pytest.raises(OSError, match="too long"):
                        made.bind(path)


def test_a_long_one_is_replaced_by_a_short_one_that_can_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * LONGEST)
    monkeypatch.setattr(sockets, "SHORT", (tmp_path / "missing", tmp_path))
    assert socket_variables({}) == {VARIABLE: str(tmp_path)}
    assert socket_variables({VARIABLE: "/chosen"}) == {}
    monkeypatch.setattr(sockets, "SHORT", ())
    assert socket_variables({}) == {}
