"""Every reader of files that may come from anyone reads a mutated file, or says in one line why not."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.fuzz.readers import READERS, SEEDS, inputs, verdict
from tests.fuzz.run import fuzzed, here

FEW = {"page": 8, "study": 8, "events": 15, "replay": 15, "analyst": 15, "metrics": 40, "payload": 40}
"""Short form: these draw a page, or count a whole stream, for each input."""
KEPT = sorted(path for path in SEEDS.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", READERS)
def test_mutated_files_are_read_or_refused_in_one_line(name: str) -> None:
    outcome = here(name, FEW.get(name, 120), seed=1)
    assert outcome.wrong == {}
    assert outcome.done == outcome.read + outcome.refused
    assert outcome.read, "the mutations leave nothing to read"


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_once_crashed_does_not_again(path: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verdict(path.parent.name, path.read_bytes(), tmp_path)[0] == ""


def test_the_nth_input_is_the_same_in_every_process() -> None:
    whole, later = inputs("run", 7), inputs("run", 7, 2)
    assert [next(whole) for _ in range(3)][2] == next(later)


def test_a_child_of_two_gib_reads_them_too_and_what_kills_it_is_told() -> None:
    assert (outcome := fuzzed("log", 5)).done == outcome.read == 5
    assert fuzzed("no such reader", 5).wrong == {"the child ended with 1": -1}


def test_seeds_are_small() -> None:
    assert sum(path.stat().st_size for path in KEPT) < 2 << 20
