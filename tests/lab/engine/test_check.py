"""`kvtune check` against real servers: stock vLLM and kvtune's core answer as cold, and each planted fault is found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtune.data.layout.models import builtin, engine_defaults
from tests.faults.kvtune_test_faults import VARIABLE
from tests.lab.engine.serving import served
from tests.weights.kvtune_test_weights import LOAD_FORMAT

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[3]
FAULTS = str(ROOT / "tests" / "faults")
POOLS = {"tiny-opt": 400, "tiny-llama": 400, "tiny-gemma3": 900, "tiny-qwen3next": 60}
COMMON = ("whole", "shortest", "junction", "full")


@contextmanager
def server(folder: Path, model: str, fault: str = "", core: str = "stock", **more: str) -> Iterator[str]:
    """`vllm serve` with weights that make answers depend on the whole prompt. `more`: flags by name, `_` for `-`."""
    chosen = {**engine_defaults(model), "load-format": LOAD_FORMAT, "max-model-len": "2048"}
    del chosen["kv-cache-memory-bytes"]
    chosen |= {"num-gpu-blocks-override": str(POOLS[model]), "enable-prompt-tokens-details": ""}
    chosen |= {} if model == "tiny-qwen3next" else {"block-size": "32"}
    chosen |= {"model": str(builtin(model)), "served-model-name": model}
    chosen |= {name.replace("_", "-"): value for name, value in more.items()}
    path = os.pathsep.join([str(ROOT), FAULTS, os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "KVTUNE_CORE": core, VARIABLE: fault, "KVTUNE_STRICT": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    flags = [word for name, value in chosen.items() for word in (f"--{name}", value) if word]
    command = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    with served(folder, command, flags, environment) as base:
        yield base


def check(base: str, *words: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "kvtune", "check", base, "--yes", "--json", "--tokens", "8", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def wrong(answer: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {each["name"]: (each["wrong"], each["hits"]) for each in answer["paths"] if each["hits"]}


@pytest.mark.parametrize("core", ["stock", "kvtune"])
@pytest.mark.parametrize("model", POOLS)
def test_hits_answer_as_cold(model: str, core: str, tmp_path: Path) -> None:
    with server(tmp_path, model, core=core) as base:
        code, answer = check(base, "--prompts", "24", "--fill")
    shown = wrong(answer)
    assert set(COMMON) <= set(shown) and not any(each for each, _ in shown.values()), shown
    assert ("edge" in shown) == (model == "tiny-gemma3")
    exchanged = answer["exchanged"]
    assert exchanged["wrong"] == exchanged["hits"] == 24, "the answers say too little of their prompts"
    verdicts = {each["name"]: each["verdict"] for each in answer["paths"] if each["hits"] == 24}
    assert set(verdicts.values()) == {"as cold"} and code in (0, 3)


@pytest.mark.parametrize(
    ("fault", "model"),
    [
        ("other", "tiny-llama"),
        ("late", "tiny-llama"),
        ("layer", "tiny-gemma3"),
        ("window", "tiny-gemma3"),
        ("state", "tiny-qwen3next"),
    ],
)
def test_a_fault_in_the_blocks_of_hits_is_found(fault: str, model: str, tmp_path: Path) -> None:
    with server(tmp_path, model, fault) as base:
        code, answer = check(base, "--prompts", "6")
    assert (code, answer["verdict"]) == (1, "differs")
    assert all(each == hits for each, hits in wrong(answer).values()), wrong(answer)
    assert answer["cold"]["wrong"] == 0


def test_a_fault_in_one_of_twenty_hits_is_found(tmp_path: Path) -> None:
    with server(tmp_path, "tiny-llama", "one_in_20") as base:
        code, answer = check(base, "--prompts", "12")
    found = sum(each for each, _ in wrong(answer).values())
    assert code == 1 and 1 <= found <= 8


def test_a_salt_that_is_ignored_is_found(tmp_path: Path) -> None:
    with server(tmp_path, "tiny-llama", "salt") as base:
        code, answer = check(base, "--prompts", "2")
    assert code == 1 and answer["unsalted"]


@pytest.mark.parametrize("core", ["stock", "kvtune"])
def test_hits_of_a_tier_are_told_from_local_ones(core: str, tmp_path: Path) -> None:
    with server(tmp_path, "tiny-llama", core=core, kv_offloading_size="0.2") as base:
        code, answer = check(base, "--prompts", "24", "--fill")
    shown = wrong(answer)
    assert {"tier", "mixed"} <= set(shown) and not any(each for each, _ in shown.values()), shown
    assert answer["layout"]["tier"] and code in (0, 3)
