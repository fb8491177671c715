"""What commands print of the golden files, word by word. `python -m tests.reading.report.test_words` writes it anew."""

from __future__ import annotations

import contextlib
import io

import pytest

from tests.golden.make import FOLDER
from tests.simulator import run

WORDS = FOLDER / "words"
PRINTED = {
    "compare": ["compare", "schema1-rounds", "schema1-kvtune", "--anyway"],
    "run": ["report", "schema1-chat", "--console"],
    "real": ["report", "schema1-real", "--console"],
    "sweep": ["report", "study1-sweep", "--console"],
    "tune": ["report", "study1-tune", "--console"],
}


def printed(words: list[str]) -> str:
    files = {path.stem: str(path) for path in FOLDER.iterdir() if path.suffix in (".kvrun", ".jsonl")}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run([files.get(word, word) for word in words]) == 0
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


@pytest.mark.parametrize("name", PRINTED)
def test_a_golden_file_is_said_in_these_words(name: str) -> None:
    assert printed(PRINTED[name]) == (WORDS / f"{name}.txt").read_text(encoding="utf-8")


if __name__ == "__main__":
    for each, words in PRINTED.items():
        (WORDS / f"{each}.txt").write_text(printed(words), encoding="utf-8")
