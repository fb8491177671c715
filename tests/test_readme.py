"""README's first hour, made again in the simulator on a terminal: its outputs are what the commands print today.

Times are left out, and what only an engine measures: of the table of slow tokens the causes are checked.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtune.analysis.stalls.causes import CAUSES
from tests.cli.terminal import shown
from tests.documents import FENCE, ROOT

HOUR = (ROOT / "README.md").read_text(encoding="utf-8").split("## The first hour")[1]
BLOCKS = [block for block in FENCE.findall(HOUR) if block.startswith("$ kvtune")]
MEASURED = "slow tokens "


def words(text: str) -> str:
    """Text on one line, without times."""
    return " ".join(re.sub(r"[\d.]+ (?:ms|s|µs)(?!\w)", "", text).split())


def passages(block: str) -> list[str]:
    """What a block quotes of its commands' outputs: what stands between `...` and command lines."""
    parts = re.split(r"^\.\.\.$|^\$ .*$| \.\.\.$", block, flags=re.M)
    return [part.strip() for part in parts if part.strip()]


def commands(block: str) -> list[list[str]]:
    return [line.split()[2:] for line in block.splitlines() if line.startswith("$ kvtune")]


@pytest.mark.vllm
def test_readmes_outputs_are_what_its_commands_print(tmp_path: Path) -> None:
    assert [argv[0] for block in BLOCKS for argv in commands(block)] == [
        *("doctor", "profile", "explain", "profile", "compare", "report")
    ]
    for block in BLOCKS:
        printed = ""
        for argv in commands(block):
            simulated = ["--on", "sim"] if argv[0] == "profile" else []
            code, text = shown(*argv, *simulated, folder=tmp_path, BROWSER="true")
            assert code == 0, text
            printed += f" {words(text)}"
        quoted = [passage for passage in passages(block) if not passage.startswith(MEASURED)]
        assert quoted and [passage for passage in quoted if words(passage) not in printed] == []


def test_readmes_slow_tokens_have_causes_that_there_are() -> None:
    (table,) = [p for block in BLOCKS for p in passages(block) if p.startswith(MEASURED)]
    causes = [re.split(r" {2,}", line)[0] for line in table.splitlines()[1:]]
    assert causes and set(causes) <= set(CAUSES.values())
