"""vLLM's sockets live in a folder of the run's own, which is short enough for them and gone afterwards."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path
from uuid import uuid4

import pytest

from kvtune.lab.engine import profile
from kvtune.lab.engine.profile import LONGEST, LONGEST_PARENT, SOCKETS, socket_folder


def folder_of(parent: Path, length: int) -> Path:
    """A folder whose path has this many characters."""
    folder = parent / ("x" * (length - len(str(parent)) - 1))
    folder.mkdir()
    assert len(str(folder)) == length
    return folder


@pytest.mark.parametrize("length", [LONGEST_PARENT, LONGEST_PARENT + 1, LONGEST + 1])
def test_a_socket_fits_whatever_the_length_of_the_temp_folder(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as parent:
        temp, short = folder_of(Path(parent), length), Path(parent)
        monkeypatch.setattr(tempfile, "tempdir", str(temp))
        monkeypatch.setattr(profile, "SHORT_PATHS", (short / "missing", short))
        with socket_folder({}) as variables:
            folder = Path(variables[SOCKETS])
            assert folder.parent == (temp if length == LONGEST_PARENT else short)
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(str(folder / str(uuid4())))
        assert not folder.exists()


def test_a_longer_path_would_not_have_fitted() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as parent:
        path = folder_of(Path(parent), LONGEST + 1) / str(uuid4())
        with socket.socket(socket.AF_UNIX) as made, pytest.raises(OSError, match="too long"):
            made.bind(str(path))


def test_what_a_person_chose_stays_and_no_folder_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket_folder({SOCKETS: "/chosen"}) as variables:
        assert variables == {}
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * LONGEST)
    monkeypatch.setattr(profile, "SHORT_PATHS", ())
    with socket_folder({}) as variables:
        assert variables == {}
