"""`kvtune diff` with real children: the installed vLLM with itself, and, in `make full`, with the version after it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvtune.data.installed import installed_version
from tests.simulator import run

pytestmark = pytest.mark.vllm
HERE = str(Path(sys.prefix))


def test_a_version_differs_from_itself_in_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One side is named as a version, the other by its folder. A model that nobody knows is one line."""
    models = tmp_path / "models"
    models.write_text("tiny-qwen3next\n\ntiny-qwen3nxt\n")
    words = ["diff", installed_version(), HERE, "--models", str(models), "--like-device", "h100", "--json"]
    assert run([*words, "--fail-on", "gone > 0 or defaults > 0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["defaults"] == [] and found["names"] == [] and found["broken"] == []
    assert found["missed"] == []
    known, unknown = found["models"]
    assert known["differs"] == {} and known["failed"] == []
    assert known["old"]["hits"][-1] > 0 and known["old"]["pool_tokens"] > 0
    assert unknown["old"] is None and "no built-in model" in unknown["failed"][0]


@pytest.mark.full
def test_the_version_after_it_moves_blocks_and_hits(capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3-Next on an H100: vLLM 0.33 makes blocks multiples of 64."""
    load = "rounds:prefixes=4,prefix=6000,suffix=200,output=8,rounds=3"
    flags = ["--", "--max-model-len", "32768", "--kv-cache-memory-bytes", "40000000000"]
    words = ["diff", "0.32", "0.33", "qwen3-next-80b", "--like-device", "h100", "-w", load]
    assert run([*words, "--fail-on", "hits < -2 points", "--json", *flags]) == 1
    found = json.loads(capsys.readouterr().out)
    (model,) = found["models"]
    assert (model["old"]["block"], model["new"]["block"]) == (544, 576)
    replays = found["load"]
    rates = [replays[side]["hit_tokens"] / replays[side]["query_tokens"] for side in ("old", "new")]
    assert [round(100 * 1.5 * rate) for rate in rates] == [97, 93]  # round 1 of the three hits nothing
    assert {one["what"] for one in replays["partings"]} == {"request", "step"}
    behind = "vllm.platforms.interface.Platform._align_hybrid_block_size"
    assert all(behind in one["symbols"] for one in replays["partings"])
    for side in ("old", "new"):
        told = replays[side]
        assert told["hit_tokens"] + sum(told["misses"].values()) == told["query_tokens"]
        assert told["prefill_tokens"] == told["query_tokens"] - told["hit_tokens"]
        assert told["first_token_ms"] > told["token_gap_ms"] > 0
    assert "lookahead_token_ids" in json.dumps(found["names"])
