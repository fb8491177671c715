"""README's first hour, made again in the simulator: its outputs are what the commands print today, times left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvtune.cli.app import run
from tests.documents import FENCE, ROOT

HOUR = (ROOT / "README.md").read_text(encoding="utf-8").split("## The first hour")[1]
BLOCKS = [block for block in FENCE.findall(HOUR) if block.startswith("$ kvtune")]


def words(text: str) -> str:
    """Text on one line, without times, and without what an engine's time is worth."""
    plain = re.sub(r"[\d.]+ (?:ms|s|µs)(?!\w)", "", text)
    return " ".join(re.sub(r", which costs .*", "", plain, flags=re.S).split())


def passages(block: str) -> list[str]:
    """What a block quotes of its commands' outputs: what stands between `...` and command lines."""
    parts = re.split(r"^\.\.\.$|^\$ .*$", block, flags=re.M)
    return [words(part) for part in parts if part.strip()]


@pytest.mark.vllm
@pytest.mark.timeout(900)  # five starts of vLLM without a model
def test_readmes_outputs_are_what_its_commands_print(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    stock, ours = tmp_path / "stock", tmp_path / "core"
    profile = ["profile", "tiny-gemma3", "--on", "sim"]
    hour = (
        [["doctor", "tiny-gemma3"]],
        [[*profile, "--core", "stock", "-o", str(stock)]],
        [["explain", "STOCK"]],
        [[*profile, "-o", str(ours)], ["compare", "STOCK", "OURS"]],
    )
    for block, commands in zip(BLOCKS, hour, strict=True):
        capsys.readouterr()
        for argv in commands:
            files = {"STOCK": next(stock.glob("*.kvrun"), stock), "OURS": next(ours.glob("*.kvrun"), ours)}
            assert run([str(files.get(word, word)) for word in argv]) == 0
        printed = " ".join(re.sub(r"[\d.]+ (?:ms|s|µs)(?!\w)", "", capsys.readouterr().out).split())
        assert len(passages(block)) >= 1
        assert [passage for passage in passages(block) if passage not in printed] == []
