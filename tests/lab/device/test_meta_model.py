"""A model as on a GPU that is not here: the layers of one of several ranks, and questions that nobody can answer."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from kvtune.data.installed import keeps_states_in_chunks
from kvtune.lab.device.model_class import missing_package

pytestmark = [pytest.mark.vllm]

RANKS = """
import json, os, sys
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
from kvtune.base.errors import KvtuneError
from kvtune.lab.sim.build import configure
from kvtune.lab.setup.setup import Setup
from kvtune.plugin.vllm import absent
from kvtune.data.platforms import DEVICES

said = {"refused": ""}
inlet, outlet = os.pipe()
if os.fork() == 0:  # vLLM 0.33 asks once, when it is imported
    absent.ANSWERS.clear()
    try:
        configure(Setup(model="qwen3-30b-a3b-fp8", platform=DEVICES["h100"]))
    except KvtuneError as error:
        os.write(outlet, error.message.encode())
    os._exit(0)
os.close(outlet)
with os.fdopen(inlet) as pipe:
    said["refused"] = pipe.read()
os.wait()
for model in ("tiny-llama", "tiny-qwen3next"):
    for ranks in (1, 2, 4):
        flags = ["--tensor-parallel-size", str(ranks)]
        config, (stage,), _ = configure(Setup(model=model, engine_args=flags, platform=DEVICES["h100"]))
        pages = sorted({spec.page_size_bytes for spec in stage.specs.values()})
        said[f"{model} {ranks}"] = [config.cache_config.block_size, pages]
flags = ["--pipeline-parallel-size", "2"]
_, stages, _ = configure(Setup(model="tiny-gemma3", engine_args=flags, platform=DEVICES["h100"]))
said["stages"] = [[name.split(".")[2] for name in stage.specs] for stage in stages]
print("said", json.dumps(said))
"""


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    pytest.importorskip("vllm")
    done = subprocess.run([sys.executable, "-c", RANKS], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("said "))
    answers: dict[str, Any] = json.loads(line.removeprefix("said "))
    return answers


@pytest.mark.full
def test_a_rank_has_its_share_of_heads_and_states(said: dict[str, Any]) -> None:
    assert {name: value for name, value in said.items() if name.startswith("tiny-")} == {
        "tiny-llama 1": [16, [4096]],
        "tiny-llama 2": [16, [2048]],
        "tiny-llama 4": [16, [2048]],  # of two KV heads at least one
        "tiny-qwen3next 1": [144, [36864]],
        "tiny-qwen3next 2": [80, [20480]],
        "tiny-qwen3next 4": [48, [12288]],
    }


@pytest.mark.full
def test_a_pipelines_ranks_have_their_own_layers(said: dict[str, Any]) -> None:
    assert said["stages"] == [["0", "1"], ["2", "3"]]


@pytest.mark.full
def test_what_only_the_gpus_own_vllm_knows_is_refused_by_name(said: dict[str, Any]) -> None:
    assert "on NVIDIA H100" in said["refused"] and "torch.ops._C." in said["refused"]
    assert "only a vLLM built for it knows" in said["refused"]


def inspected(*names: str) -> ValueError:
    return ValueError(f"Model architectures {list(names)} failed to be inspected. Please check the logs")


class Class:
    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def load_model_cls(self) -> None:
        if self.error is not None:
            raise self.error


def test_the_package_that_the_models_class_lacks_is_named() -> None:
    missing = ModuleNotFoundError("No module named 'torchvision'", name="torchvision")
    over = ModuleNotFoundError("Could not import module 'Processor'.")
    over.__cause__ = missing
    models: dict[str, Any] = {"Seeing": Class(over), "Reading": Class(None)}
    assert missing_package(inspected("Unknown", "Seeing"), models) is missing
    assert missing_package(inspected("Reading"), models) is None
    assert missing_package(ValueError("another reason"), models) is None


WITHOUT = """
import sys
from importlib.machinery import PathFinder
real = PathFinder.find_spec
def found(cls, name, *rest):
    return None if name.partition(".")[0] == "torchvision" else real(name, *rest)
PathFinder.find_spec = classmethod(found)
from kvtune.lab.sim.build import run_on
from kvtune.data.platforms import DEVICES
device = DEVICES.get(sys.argv[1])
run_on(device)
from kvtune.answers.doctor.child import facts_of
from kvtune.lab.setup.setup import Setup
from kvtune.base.errors import KvtuneError
try:
    facts = facts_of(Setup(model=sys.argv[2], engine_args=["--max-model-len", "8192"], platform=device))
    print("hits", facts.hit_tokens)
except KvtuneError as error:
    print(error.message, "|", error.hint)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("device", "model", "says"),
    [
        ("h100", "gemma-4-26b", "hits 32"),
        ("h100", "qwen3.5-27b", f"hits {832 if keeps_states_in_chunks() else 784}"),
        ("h100", "mistral-small-3.1", "hits 16"),
        (
            "",
            "gemma-4-26b",
            "No module named 'torchvision' | simulate it as on a GPU: --on sim --like-device h100; or "
            "install torchvision, built for this torch",
        ),
    ],
)
def test_models_with_images_without_torchvision(device: str, model: str, says: str) -> None:
    """As a plain install of vLLM for the CPU has it: a GPU's plan is whole, and the CPU's names what is missing."""
    pytest.importorskip("vllm")
    made = subprocess.run(
        [sys.executable, "-c", WITHOUT, device, model], capture_output=True, text=True, check=False
    )
    assert says in made.stdout, made.stdout + made.stderr[-1500:]
