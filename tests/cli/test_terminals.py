"""What a terminal shows: 80 columns, or 40, no colours, no UTF-8. Real processes on a real pseudo-terminal."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from kvtune.data.run.file import read_run
from kvtune.reading.analysis.rebuild import workload_of
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from tests.choice import first_of
from tests.cli.terminal import KVTUNE, bare, on_a_terminal, shown

GOLDEN = Path(__file__).parents[1] / "golden"
RUN = GOLDEN / "schema1-real.kvrun"
CONSOLE = ("report", str(RUN), "--console")
COMMAND = [*KVTUNE, *CONSOLE]
FIGURES = ("24 requests", "62.7 %", "EngineCore")
EIGHTY = 80


@pytest.mark.parametrize("term", ["dumb", "xterm-256color"])
def test_forty_columns_are_enough_for_every_figure(term: str) -> None:
    with on_a_terminal(COMMAND, columns=40, environment=bare(TERM=term, LC_ALL="C")) as terminal:
        code, text = terminal.rest()
    assert code == 0
    for figure in FIGURES:
        assert figure in text
    assert (b"\x1b[" in terminal.raw) is (term != "dumb")


def commands_cut(text: str) -> list[str]:
    """Lines that are longer than the terminal and no command to copy."""
    lines = (line.rstrip() for line in text.splitlines())
    return [
        line for line in lines if len(line) > EIGHTY and not line.startswith(("  kvtune ", "  for run in "))
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ("report", f"schema1-{name}.kvrun", "--console")
            for name in ("real", "kvtune", "evictions", "sim")
        ),
        ("compare", "schema1-rounds.kvrun", "schema1-kvtune.kvrun", "--anyway"),
        ("bounds", "-w", "rounds", "--model", "tiny-gemma3"),
    ],
    ids=" ".join,
)
def test_eighty_columns_cut_no_number_and_no_command(arguments: tuple[str, ...]) -> None:
    code, text = shown(*arguments, folder=GOLDEN)
    assert code == 0
    assert "…" not in text and commands_cut(text) == []


def test_every_number_of_a_table_is_whole_or_its_column_is_not_there() -> None:
    """The collector's table was cut to `709,21`."""
    _, narrow = shown(*CONSOLE)
    wide = subprocess.run(COMMAND, capture_output=True, text=True, env=bare(), check=True).stdout
    numbers = re.compile(r"\d[\d,.]*\d|\d")
    assert set(numbers.findall(narrow)) <= set(numbers.findall(wide))
    assert "709,218" in wide and ("709,218" in narrow or "frozen" in narrow.split("no room for: ")[1])


def test_the_next_command_stands_on_one_line_to_be_copied() -> None:
    recorded = read_run(RUN)
    command = summary(RunAnalysis(recorded, workload_of(recorded)))["verdict"]["command"]
    assert len(command) > EIGHTY
    _, text = shown(*CONSOLE)
    assert f"\n  {command}\n" in text


@pytest.mark.parametrize("encoding", first_of(["ascii", "latin-1", "utf-8"]))
def test_what_the_output_cannot_encode_is_a_question_mark(encoding: str) -> None:
    done = subprocess.run(COMMAND, capture_output=True, env=bare(PYTHONIOENCODING=encoding), check=False)
    text = done.stdout.decode(encoding)
    assert done.returncode == 0, done.stderr
    for figure in FIGURES:
        assert figure in text
    assert ("µs" in text) is (encoding != "ascii")


def test_an_error_on_such_a_terminal_is_still_two_lines() -> None:
    command = [*KVTUNE, "report", "no–such–file.kvrun"]
    done = subprocess.run(command, capture_output=True, env=bare(PYTHONIOENCODING="ascii"), check=False)
    first, second = done.stderr.decode("ascii").strip().splitlines()
    assert done.returncode == 2 and first.startswith("kvtune: ") and second.startswith("  next: ")
