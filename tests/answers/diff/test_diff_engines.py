"""What `kvtune diff` replays equals real engines of both versions, to the token: six models, three loads each.

`make full`: a model and load take a minute or two, for two engines and a comparison. `-s` prints the rows of the table
in docs/diff.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtune.answers.diff.environments import make
from kvtune.data.installed import installed_version
from tests.scripts import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1800)]

VERSIONS = ("0.32.0", "0.33.0")
FLAGS = ["--max-num-batched-tokens", "512", "--max-num-seqs", "16", "--max-model-len", "1000"]
STATES = ["--max-num-batched-tokens", "1024", "--max-num-seqs", "16", "--max-model-len", "2400"]
ROUNDS = "rounds:prefixes=3,prefix=700,suffix=40,output=8,rounds=3"
ZIPF = "zipf:prefixes=6,prefix=500,suffix=40,requests=14,output=12"
MIX = "mix:prefixes=2,prefix=500,requests=10,cold=600,output=6"
ATTENTION = ((ROUNDS, 110), (ZIPF, 80), (MIX, 80))
"""Loads, and the blocks of a pool that is too small for them. One request at a time: when requests arrive beside each
other, and with that preemptions, differs from run to run of one engine. test_lockstep.py holds these."""
STATE = ((ROUNDS.replace("700", "2100"), 60), (ZIPF, 30), (MIX, 30))
"""Hybrids, with the block size that they get anyway: without it vLLM 0.32's engine process on a CPU forgets it once it
has begun, and its scheduler ends chunks at multiples of 128 tokens, where no state is kept. Replays do not forget."""
MODELS = {
    "tiny-opt": (["--block-size", "32", *FLAGS], ATTENTION),
    "tiny-llama": (["--block-size", "32", *FLAGS], ATTENTION),
    "tiny-gemma3": (["--block-size", "32", *FLAGS], ((ROUNDS, 400), (ZIPF, 180), (MIX, 180))),
    "tiny-qwen3next": (["--block-size", "384", *STATES], STATE),
    "tiny-granite": (STATES, STATE),
    "tiny-qwen3moe": (["--block-size", "32", *FLAGS, "--kv-cache-memory-bytes", "100000000"], ATTENTION),
}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
"""The configuration of a sixth family, which is none of the built-in models."""


@pytest.fixture(scope="module")
def pythons() -> list[str]:
    """Return the interpreters of both versions, with kvtune and what its engines need, as `.ci/versions` has them."""
    folders = [
        Path(os.environ.get("KVTUNE_VERSIONS", ROOT / ".venv-versions")) / version for version in VERSIONS
    ]
    for version, folder in zip(VERSIONS, folders, strict=True):
        if version != installed_version() and not (folder / "bin" / "python").exists():
            make(version, folder, ["-e", f"{ROOT}[test]"])
    return [
        sys.executable if version == installed_version() else str(folder / "bin" / "python")
        for version, folder in zip(VERSIONS, folders, strict=True)
    ]


def asked(python: str, *words: str, folder: Path) -> dict[str, Any]:
    """Return the JSON that a command prints."""
    done = subprocess.run(
        [python, "-m", "kvtune", words[0], "--json", *words[1:]],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={
            **os.environ,
            "NO_COLOR": "1",
            "PYTHONPATH": str(ROOT),
            "VLLM_CACHE_ROOT": str(folder / Path(python).parts[-3]),
        },
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def of_engine(profile: dict[str, Any]) -> dict[str, int]:
    cache = profile["prefix_cache"]
    return {
        "prompt tokens": cache["query_tokens"],
        "hits": cache["hit_tokens"],
        "misses": sum(cache["misses"].values()),
        "preemptions": profile["preemptions"],
    }


def of_replay(side: dict[str, Any]) -> dict[str, int]:
    return {
        "prompt tokens": side["query_tokens"],
        "hits": side["hit_tokens"],
        "misses": sum(side["misses"].values()),
        "preemptions": side["preemptions"],
    }


@pytest.mark.parametrize("number", range(3), ids=["rounds", "zipf", "mix"])
@pytest.mark.parametrize("model", MODELS)
def test_replays_of_both_versions_equal_their_engines(
    model: str, number: int, pythons: list[str], tmp_path: Path
) -> None:
    flags, loads = MODELS[model]
    load, blocks = loads[number]
    named = model
    if model == "tiny-qwen3moe":
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.json").write_text(json.dumps(MIXTURE))
        named = str(tmp_path / model)
    engine = ["-w", load, "--", *flags, "--num-gpu-blocks-override", str(blocks)]
    sides = [str(Path(python).parents[1]) for python in pythons]
    replays = asked(sys.executable, "diff", *sides, named, *engine, folder=tmp_path)["load"]
    assert replays["failed"] == []
    equal = []
    for version, python, side in zip(VERSIONS, pythons, ("old", "new"), strict=True):
        own = ["--core", "stock", "--tries", "0", "--dummy", "-o", str(tmp_path)]
        real = asked(python, "profile", named, *own, *engine, folder=tmp_path)
        assert real["engine"]["vllm"] == version
        replay, done = of_replay(replays[side]), of_engine(real)
        figures = " | ".join(f"{n:,}" for n in replay.values())
        print(f"| {model} | {load.partition(':')[0]} | {version} | {figures} | {done} |")
        equal.append(replay == done)
    assert all(equal)
