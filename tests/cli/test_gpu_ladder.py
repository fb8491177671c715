"""`make gpu`: a ladder that keeps what it has. With a stand-in for the commands; the dry run is in tests/lab/engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_ladder
from bench.gpu_ladder import RUNGS, Failed, Ladder, OutOfTime

RUN = {
    "throughput_tok_s": 1000.0,
    "ceiling": None,
    "rounds": [{"hit_tokens": 0, "query_tokens": 10}, {"hit_tokens": 9, "query_tokens": 10}],
    "ttft_ms": {"mean": 5.0},
    "step_ms": {},
    "run_file": "a.kvrun",
    "engine": {"block_size": 16},
    "prefix_cache": {"hit_rate": 0.45},
    "core": {"parts": {"packed": True}},
    "notes": [],
    "startup_s": 12.0,
    "differing_requests": 0,
    "environment": [{"topic": "device", "text": "a GPU"}],
}


class Commands:
    """Answers each command with RUN, but stops or fails at the one named."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.words: dict[str, tuple[str, ...]] = {}
        self.stop_at = self.fail_at = ""

    def kvtune(self, ladder: Ladder, name: str, *words: str) -> dict[str, Any]:
        if name == self.stop_at:
            raise OutOfTime(name)
        if name == self.fail_at:
            raise Failed(f"{name}: broken")
        self.names.append(name)
        self.words[name] = words
        return RUN


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    fake = Commands()
    monkeypatch.setattr(
        Ladder, "kvtune", lambda ladder, name, *words, environment=None: fake.kvtune(ladder, name, *words)
    )
    monkeypatch.setattr(gpu_ladder, "answers_of", lambda path: [1, 2])
    return fake


def summary(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return read


def test_all_rungs_are_climbed_and_summed_up(commands: Commands, tmp_path: Path) -> None:
    assert gpu_ladder.main(["-o", str(tmp_path)]) == 0
    made = summary(tmp_path)
    assert list(made["rungs"]) == [name for name, _ in RUNGS] and not made["stopped"]
    shape = made["rungs"]["gemma-3-4b"]["result"]
    assert shape["equal_answers"] == {"again": 1.0, "kvtune": 1.0}
    assert shape["kvtune"]["hit_share_by_visit"] == [0.0, 0.9] and shape["kvtune"]["notes"] == []
    assert commands.names[-1] == "tune"
    assert "9 of 9 rungs" in (tmp_path / "summary.md").read_text()


def test_out_of_time_keeps_what_there_is_and_the_next_call_goes_on(
    commands: Commands, tmp_path: Path
) -> None:
    commands.stop_at = "gemma-3-4b-kvtune"
    assert gpu_ladder.main(["-o", str(tmp_path)]) == 0
    made = summary(tmp_path)
    assert list(made["rungs"]) == ["device and versions", "first proof"]
    assert "gemma-3-4b-kvtune" in made["stopped"]
    commands.stop_at, commands.names = "", []
    assert gpu_ladder.main(["-o", str(tmp_path)]) == 0
    assert commands.names[0] == "gemma-3-4b-first" and len(summary(tmp_path)["rungs"]) == len(RUNGS)


def test_a_rung_that_fails_is_named_and_the_next_ones_are_climbed(commands: Commands, tmp_path: Path) -> None:
    commands.fail_at = "packed-packed"
    assert gpu_ladder.main(["-o", str(tmp_path)]) == 1
    made = summary(tmp_path)
    assert made["rungs"]["packed blocks"] == {"failed": "packed-packed: broken"}
    assert "result" in made["rungs"]["tune"]
    commands.fail_at, commands.names = "", []
    assert gpu_ladder.main(["-o", str(tmp_path)]) == 0, "a failed rung is tried again"
    assert commands.names == ["tiny-qwen3next-first", "packed-stock", "packed-packed"]


def test_each_models_first_start_is_thrown_away(commands: Commands, tmp_path: Path) -> None:
    """It compiles and fills caches, which the next one has: the side that ran first would be the slower one."""
    assert gpu_ladder.main(["-o", str(tmp_path)]) == 0
    on_engines = [
        (words[1], name)
        for name, words in commands.words.items()
        if words[0] == "profile" and "--on" not in words and words[1] != "tiny-opt"
    ]
    for model in ("gemma-3-4b", "opt-125m", "tiny-qwen3next"):
        assert next(name for used, name in on_engines if used == model) == f"{model}-first"
