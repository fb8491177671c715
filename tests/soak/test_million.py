"""The million's checks on a few thousand requests: nothing fails, what is planted is found, a seed repeats itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tools.soak.million_growth import FEWEST, Counts, Slope, slopes

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[2]
PLANTS = {
    "block_freed_twice": "ref_cnt -1",
    "request_kept_after_its_abort": "-> request 10",
    "table_entry_kept_after_an_abort": "num_cached_block has",
    "request_finished_short": "tokens, not",
    "abort_not_heard": "which is aborted",
    "request_never_scheduled": "neither ended nor been aborted",
    "other_block_than_stock": "alike differs from stock in digests",
    "steady_path_gives_up": "steady path: gave up",
    "bytes_kept_by_a_request": "the process grows: blocks",
}
"""By name, what the failure says."""
SHRUNK = {"block_freed_twice": 40, "request_kept_after_its_abort": 60, "request_never_scheduled": 40}
"""At most so many of a round's 80 to 160 requests are left within 8 replays."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("vllm", reason="needs vLLM")
    out = tmp_path_factory.mktemp("million") / "played.json"
    command = [sys.executable, "-m", "tests.tools.soak.million_plants", str(out)]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVTUNE_")}
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env=environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    portions: dict[str, Any] = json.loads(out.read_text())
    return portions


@pytest.mark.full
@pytest.mark.vllm
def test_each_model_plays_its_rounds_and_nothing_is_left(played: dict[str, Any]) -> None:
    models = [portion["model"] for portion in played["models"]]
    assert models == ["tiny-llama", "tiny-gemma3", "tiny-qwen3next"]
    for portion in played["models"]:
        assert portion["failure"] == ""
        assert portion["requests"] >= 600 and portion["rounds"] >= 4
        assert portion["in_lockstep"] > portion["requests"]
        assert portion["aborted"] and portion["preemptions"] and portion["audits"] > 1000


@pytest.mark.full
@pytest.mark.vllm
def test_a_seed_repeats_every_batch(played: dict[str, Any]) -> None:
    one, again, other = ({**portion, "seconds": 0.0} for portion in played["seeds"])
    assert one == again and one["checksum"]
    assert other["checksum"] != one["checksum"]


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_planted_is_found(played: dict[str, Any], plant: str) -> None:
    assert played["plants"].keys() == PLANTS.keys()
    portion = played["plants"][plant]
    assert PLANTS[plant] in portion["failure"]
    if plant == "bytes_kept_by_a_request":
        assert portion["failed_round"] is None
    else:
        assert portion["failed_round"] == 0
    if plant in SHRUNK:
        assert 0 < len(portion["fewest"]) <= SHRUNK[plant]


def line(growth: float, seed: int, count: int = 40) -> list[Slope]:
    """Noisy censuses every 100 requests of a process that grows by so many objects a request."""
    rng = np.random.default_rng(seed)
    requests = [100 * number for number in range(count)]
    grown = [50_000 + round(growth * at + 300.0 * float(rng.normal())) for at in requests]
    return slopes(requests, [Counts(each, each, 1 << 28) for each in grown])


def test_growth_of_more_than_two_objects_a_request_is_seen_through_noise() -> None:
    held = 0
    for seed in range(60):
        objects, blocks, rss = line(2.5, seed)
        assert not objects.flat and not blocks.flat
        assert rss.flat and rss.slope == 0.0
        held += objects.low < 2.5 < objects.high
    assert 51 <= held < 60  # of 95 % intervals


def test_noise_is_no_growth_and_few_censuses_say_nothing() -> None:
    assert sum(line(0.0, seed)[0].flat for seed in range(60)) >= 55
    assert line(0.0, 0, count=FEWEST) == []
