"""The million's checks on a few hundred requests of each model: nothing fails, and a seed repeats itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.full, pytest.mark.vllm, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]


def played(out: Path, *words: str) -> list[dict[str, Any]]:
    pytest.importorskip("vllm", reason="needs vLLM")
    command = [sys.executable, "-m", "bench.soak.million", *words, "--json", str(out)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVTUNE_")}
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    portions: list[dict[str, Any]] = json.loads(out.read_text())
    return portions


def test_each_model_plays_its_rounds_and_nothing_is_left(tmp_path: Path) -> None:
    portions = played(tmp_path / "played.json", "--requests", "1800")
    assert [portion["model"] for portion in portions] == ["tiny-llama", "tiny-gemma3", "tiny-qwen3next"]
    for portion in portions:
        assert portion["failure"] == ""
        assert portion["requests"] >= 600 and portion["rounds"] >= 4
        assert portion["in_lockstep"] > portion["requests"]
        assert portion["aborted"] and portion["preemptions"] and portion["audits"] > 1000


def test_a_seed_repeats_every_batch(tmp_path: Path) -> None:
    sums = [
        played(tmp_path / "played.json", "--model", "tiny-llama", "--round", "1", "--seed", str(seed))[0][
            "checksum"
        ]
        for seed in (3, 3, 4)
    ]
    assert sums[0] == sums[1] != sums[2] and sums[0]
