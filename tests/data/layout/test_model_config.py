"""config.json of a model named on the hub, from a cache folder as vLLM's own download leaves it. No network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtune.answers.tune.search import tuned_space
from kvtune.answers.tune.space.grid import build_space
from kvtune.answers.tune.space.model import model_facts
from kvtune.base.errors import UsageError
from kvtune.data.layout import models
from kvtune.data.layout.model_config import MOST_BYTES, model_config
from kvtune.data.layout.models import FOLDER
from kvtune.lab.setup.resolve import resolve
from tests.simulator import run as kvtune

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
        "from kvtune.data.layout.model_config import model_config as read\n"
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


HOSTILE: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "huge": lambda path: path.write_bytes(b" " * (MOST_BYTES + 1)),
    "deep": lambda path: path.write_text("[" * 200_000),
    "deep objects": lambda path: path.write_text('{"a":' * 200_000),
    "digits": lambda path: path.write_text('{"architectures": ["A"], "n": ' + "9" * 5000 + "}"),
    "half a character": lambda path: path.write_text('{"architectures": ["\\ud800"]}'),
    "bytes": lambda path: path.write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.parametrize("command", ["profile", "serve"])
def test_a_folder_whose_config_cannot_be_read_is_refused_before_a_process_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
    command: str,
) -> None:
    HOSTILE[what](tmp_path / "config.json")
    assert model_config(str(tmp_path)).why and not model_config(str(tmp_path)).fields
    with pytest.raises(UsageError, match=r"config\.json (cannot be read|is not JSON): ") as no:
        resolve(str(tmp_path), dummy=True, engine_args=[])
    assert len(no.value.message.splitlines()) == 1
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: pytest.fail(f"started {args}"))
    dummy = ["--dummy"] if command == "profile" else ["--", "--load-format", "dummy"]
    assert kvtune([command, str(tmp_path), *dummy]) == 2
    assert "unexpected" not in capsys.readouterr().err


def test_infinity_and_nan_are_numbers_as_in_nemotrons_config(tmp_path: Path) -> None:
    text = '{"architectures": ["NemotronHForCausalLM"], "time_step_limit": [0.0, Infinity], "x": NaN, "y": -Infinity}'
    (tmp_path / "config.json").write_text(text)
    found = model_config(str(tmp_path))
    assert not found.why and found.fields["time_step_limit"] == [0.0, float("inf")]
    assert "--load-format" in resolve(str(tmp_path), dummy=True, engine_args=[]).args


def test_doctor_and_bounds_read_a_config_with_infinity(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = json.loads((FOLDER / "tiny-llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "time_step_limit": [0.0, float("inf")]}))
    assert kvtune(["bounds", "--model", str(tmp_path), "-w", "rounds:prefixes=2,prefix=100,rounds=2"]) == 0
    assert kvtune(["doctor", str(tmp_path), "--json"]) in (0, 1, 2)
    assert "Infinity" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (
            {"num_hidden_layers": 10**9},
            "field num_hidden_layers is 1,000,000,000, and a model has at most 1,000",
        ),
        ({"text_config": {"n_layers": 1e300}}, "field n_layers is 1e+300, and a model has"),
        (
            {"parts": [{"layer_types": ["full_attention"] * 1001}]},
            "field layer_types lists 1,001, and a model has",
        ),
        (
            {"max_position_embeddings": 10**12},
            "field max_position_embeddings is 1,000,000,000,000, and a model has",
        ),
        ({"n_routed_experts": 20_000}, "field n_routed_experts is 20,000, and a model has at most 10,000"),
    ],
)
def test_more_layers_or_experts_than_a_model_has_are_refused_by_file_and_field(
    config: dict[str, object], why: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = model_config(str(tmp_path))
    assert f"{tmp_path / 'config.json'}: {why}" in found.why and not found.fields
