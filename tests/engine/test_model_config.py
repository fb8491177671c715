"""config.json of a model named on the hub, from a cache folder as vLLM's own download leaves it. No network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvtune.engine import models
from kvtune.engine.model_config import model_config
from kvtune.tune.search import tuned_space
from kvtune.tune.space.grid import build_space
from kvtune.tune.space.model import model_facts

GEMMA, WINDOWLESS = "google/gemma-3-4b-it", "meta-llama/Llama-3-8B"
COMMIT = "0" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one model, its files where `huggingface_hub` puts them."""
    constants = pytest.importorskip("huggingface_hub.constants")
    folder = tmp_path / "hub" / f"models--{GEMMA.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    kept = folder / "snapshots" / COMMIT / "config.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(models.config("gemma-3-4b")))
    # The library read HF_HOME when a test imported it first.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return kept


def test_a_model_on_the_hub_is_searched_as_the_same_model_in_a_folder(cache: Path) -> None:
    facts = model_facts(GEMMA, None, 4096)
    assert not facts.unknown and facts.window == 1024
    named = model_facts("gemma-3-4b", None, 4096)
    assert facts == replace(named, packing_refusal=named.packing_refusal.replace("gemma-3-4b", GEMMA))
    assert {"pin_window", "slack", "windows", "min_drop", "prefix_cache_retention_interval"} <= set(
        tuned_space(facts, {})
    )


def test_the_command_line_reads_the_cache_that_the_environment_names(cache: Path) -> None:
    code = (
        "from kvtune.engine.model_config import model_config as read\n"
        f"print(read({GEMMA!r}).fields['sliding_window'])"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("HF_HUB_CACHE", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "1024"


def test_of_a_model_whose_config_cannot_be_had_the_defaults_are_candidates(cache: Path) -> None:
    facts = model_facts(WINDOWLESS, None, 4096)
    assert facts.unknown.startswith(f"config.json of {WINDOWLESS} is not in the hub's cache")
    space = build_space(["pin", "block_size"], [], facts)
    assert 512 in space["slack"] and 0 in space["pin_window"] and "two_class" in space["policy"]
    assert facts.block_tokens in space["block_size"]


def test_a_damaged_file_and_a_missing_one_are_named(cache: Path, tmp_path: Path) -> None:
    cache.write_text("{")
    assert f"{cache} is not JSON" in model_config(GEMMA).why
    cache.write_text("[]")
    assert model_config(GEMMA).why == f"{cache} is no JSON object"
    assert "config.json cannot be read" in model_config(str(tmp_path)).why
