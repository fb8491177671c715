"""README's first hour, made again in the simulator on a terminal: its outputs are what the commands print today.

Times are left out, and what only an engine measures: of the stalls the cause is checked.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtune.reading.analysis.stalls.delays import CAUSES
from tests.cli.terminal import shown
from tests.documents import FENCE, ROOT

HOUR = (ROOT / "README.md").read_text(encoding="utf-8").split("## The first hour")[1]
BLOCKS = [block for block in FENCE.findall(HOUR) if block.startswith("$ kvtune")]
MEASURED = "Stalls: "
PROGRESS = re.compile(r"[^\n]*━[^\n]*\n?")


def words(text: str) -> str:
    """Text on one line, without times."""
    return " ".join(re.sub(r"[\d.]+ (?:ms|s|µs)(?!\w)", "", text).split())


def screen_lines(text: str) -> int:
    """Lines of 80 columns that stay on the screen: progress takes its line away again."""
    lines = [line.rstrip() for line in PROGRESS.sub("", text).splitlines()]
    return sum(1 + max(0, len(line) - 1) // 80 for line in lines)


def passages(block: str) -> list[str]:
    """What a block quotes of its commands' outputs: what stands between `...` and command lines."""
    parts = re.split(r"^\.\.\.$|^\$ .*$| \.\.\.$", block, flags=re.M)
    return [part.strip() for part in parts if part.strip()]


def commands(block: str) -> list[list[str]]:
    return [line.split()[2:] for line in block.splitlines() if line.startswith("$ kvtune")]


def as_replayed(passage: str) -> str:
    """What a simulator says where README has an engine's words: it measured nothing."""
    return passage.replace("Measured: ", "Replayed: ").replace(" hit. Replayed: ", " hit; ")


@pytest.mark.vllm
@pytest.mark.lint
def test_readmes_outputs_are_what_its_commands_print(tmp_path: Path) -> None:
    assert [argv[0] for block in BLOCKS for argv in commands(block)] == [
        *("profile", "explain", "profile", "compare", "report")
    ]
    for block in BLOCKS:
        printed = ""
        for argv in commands(block):
            simulated = ["--on", "sim"] if argv[0] == "profile" else []
            code, text = shown(*argv, *simulated, folder=tmp_path, BROWSER="true")
            assert code == 0, text
            if argv[0] == "profile":
                assert screen_lines(text) <= 24, PROGRESS.sub("", text)
            printed += f" {words(text)}"
        quoted = [as_replayed(passage) for passage in passages(block) if not passage.startswith(MEASURED)]
        assert quoted and [passage for passage in quoted if words(passage) not in printed] == []


def test_readmes_stalls_have_a_cause_that_there_is() -> None:
    (told,) = [words(p) for block in BLOCKS for p in passages(block) if p.startswith(MEASURED)]
    assert any(told.endswith(f"In most of that, {cause}.") for cause in CAUSES.values())
