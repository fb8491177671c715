"""The engine that is measured, simulated, diagnosed and tuned is the one that `vllm serve` starts on that device."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvtune
from kvtune.answers.tune.space.model import model_facts
from kvtune.data.knobs import KNOBS
from kvtune.data.platforms import DEVICES

MODELS = ("tiny-opt", "tiny-gemma3", "tiny-qwen3next", "tiny-granite", "gemma-3-4b")

DECIDE = """
import json, sys
from pathlib import Path
from kvtune.lab.as_if.platform import force
from kvtune.data.platforms import DEVICES
force(DEVICES["h100"])
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from kvtune import __version__
from kvtune.answers.doctor.child import facts_of
from kvtune.lab.engine.config import engine_config, parse_engine_args
from kvtune.lab.setup.resolve import resolve
from kvtune.data.recipe import About, Recipe, write_recipe
from kvtune.lab.sim.build import configure
from kvtune.lab.setup.setup import Setup
from kvtune.answers.tune.recipes.serving import serving

H100 = DEVICES["h100"]

def batch(config):
    return [config.scheduler_config.max_num_batched_tokens, config.scheduler_config.max_num_seqs]

def served(model, folder):
    path = folder / f"{model}.toml"
    write_recipe(Recipe(recipe=About(model=model, device="cpu", vllm="", kvtune=__version__)), path)
    words = serving(model, path, None, ["--dtype", "bfloat16"], {}, anyway=True).command[3:]
    words = ["--model", words[0], *words[1:]]
    return AsyncEngineArgs.create_engine_config(parse_engine_args(words), UsageContext.OPENAI_API_SERVER)

decided = {}
for model in sys.argv[2:]:
    words = resolve(model, dummy=True, engine_args=[], platform=H100).args
    simulated, _, _ = configure(Setup(model=model, platform=H100))
    facts = facts_of(Setup(model=model, platform=H100))
    decided[model] = {
        "engine": batch(engine_config(parse_engine_args(words))),
        "recipe": batch(served(model, Path(sys.argv[1]))),
        "sim": [*batch(simulated), simulated.cache_config.block_size],
        "doctor": [facts.batched_tokens, facts.max_requests, facts.block_tokens],
        "async": simulated.scheduler_config.async_scheduling,
    }
print("decided", json.dumps(decided))
"""


@pytest.fixture(scope="module")
def decided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What vLLM's configuration becomes for each model as on an H100, in its own process."""
    pytest.importorskip("vllm")
    folder = str(tmp_path_factory.mktemp("recipes"))
    done = subprocess.run(
        [sys.executable, "-c", DECIDE, folder, *MODELS], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("decided ")]
    answers: dict[str, Any] = json.loads(lines[-1].removeprefix("decided "))
    return answers


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.parametrize("model", MODELS)
def test_as_on_an_h100_all_agree_on_chunk_seats_and_block_size(model: str, decided: dict[str, Any]) -> None:
    facts = model_facts(model, None, 4096, platform=DEVICES["h100"])
    tuned = [facts.batched_tokens, facts.sequences, facts.block_tokens]
    said = decided[model]
    assert said["engine"] == said["recipe"] == [8192, 1024]
    assert said["sim"] == said["doctor"] == tuned
    assert tuned[:2] == [8192, 1024] and said["async"]


def test_what_is_served_is_among_the_candidates() -> None:
    for name in ("h100", "a100", "cpu"):
        facts = model_facts("tiny-gemma3", None, 4096, platform=DEVICES[name])
        assert facts.batched_tokens in KNOBS["max_num_batched_tokens"].candidates(facts)
        assert facts.sequences in KNOBS["max_num_seqs"].candidates(facts)
        assert facts.block_tokens in KNOBS["block_size"].candidates(facts)


@pytest.mark.lint
def test_one_function_makes_vllms_configuration() -> None:
    """vLLM takes other chunks and seats without its server's usage context: nobody else may ask for a configuration."""
    makers = [
        path.relative_to(Path(kvtune.__file__).parent).as_posix()
        for path in Path(kvtune.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "create_engine_config"
    ]
    assert makers == ["lab/engine/config.py"]
