"""What vLLM makes of each built-in shape on an H100, and what hits: `python -m bench.models [NAME ..]`.

Each shape is replayed with stock vLLM and with the core (`--on sim --like-device h100`). The answers of this
environment's vLLM are added to the results, from which `make docs` writes the table of reports/evidence/models.md;
tests/lab/sim/test_like_device.py holds the results to what is replayed again. Without names: all shapes;
`make versions` does that in the environment of each known version.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from kvtune.answers.doctor.planned import read_config
from kvtune.base.errors import KvtuneError
from kvtune.data.layout.models import SHAPES
from kvtune.data.platforms import DEVICES
from kvtune.data.run.types import Run
from kvtune.lab.setup.resolve import check_engine
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from kvtune.requests.loads.spec import build
from tests.simulator import on

RESULTS = Path(__file__).parents[1] / "reports" / "tables" / "models.json"
ROUNDS = 3
LOAD = f"rounds:prefixes=4,prefix=6000,suffix=200,output=8,rounds={ROUNDS}"
FLAGS = ["--kv-cache-memory-bytes", "40000000000"]
"""The same pool for every shape: an H100 holds no weights of the large ones."""
LONGEST = 32_768
H100 = DEVICES["h100"]
SHORT = {"opt-125m": 2048}
"""Shapes whose model takes no request of the load."""
TWINS = {
    frozenset({"FullAttention"}): "tiny-llama",
    frozenset({"FullAttention", "SlidingWindow"}): "tiny-gemma3",
    frozenset({"FullAttention", "Mamba gdn_attn"}): "tiny-qwen3next",
    frozenset({"FullAttention", "Mamba mamba2"}): "tiny-granite, core only",
    frozenset({"ChunkedLocalAttention", "FullAttention"}): "tiny-llama4",
    frozenset({"FullAttention", "Mamba short_conv"}): "tiny-lfm2moe",
}
"""The tiny model that runs in step with its replay on the real CPU engine (test_lockstep, test_twins)."""
CORES = ("stock", "kvtune")


def set_up(name: str, core: Any) -> Setup:
    longest = 8192 if name == "llama-3-8b" else LONGEST
    flags = [*FLAGS, "--max-model-len", str(longest)]
    return Setup(model=name, core=core, engine_args=flags, device=Simulated(), platform=H100).sized()


def hits(run: Run) -> list[int]:
    """Percent of the prompt tokens of each round that hit."""
    requests = run.table("requests")
    rounds = [requests["round"] == number for number in range(ROUNDS)]
    return [round(100 * requests["hit_tokens"][r].sum() / requests["prompt_tokens"][r].sum()) for r in rounds]


def answer(stock: Run | KvtuneError, core: Run | KvtuneError) -> dict[str, Any]:
    """What the two replays show. A refusal: its message."""
    if isinstance(stock, KvtuneError):
        return {"refused": stock.message}
    engine = stock.header.engine
    specs = engine.kv_specs["specs"]
    layers = Counter(
        (class_of(specs[number]), specs[number]["fields"]["block_size"])
        for number in engine.kv_specs["layers"].values()
    )
    return {
        "specs": [[name, block, count] for (name, block), count in sorted(layers.items())],
        "groups": len(engine.kv_specs["groups"]),
        "block_bytes": engine.pool_bytes // engine.num_blocks,
        "hit_unit": engine.settings["hit_alignment_tokens"],
        "hash_unit": engine.settings["hash_block_size"],
        "blocks": engine.num_blocks,
        "stock": hits(stock),
        "core": {"refused": core.message} if isinstance(core, KvtuneError) else hits(core),
    }


def class_of(spec: dict[str, Any]) -> str:
    """The name of the spec's class; of states, with their kind."""
    name: str = spec["$spec"].removesuffix("Spec")
    kind = spec["fields"].get("mamba_type")
    return f"{name} {kind['name'].lower()}" if isinstance(kind, dict) else name


def arithmetic(name: str, vllm: dict[str, Any]) -> str:
    """Whether the planner's arithmetic gives vLLM's block size, groups and hit unit; or that it refuses."""
    try:
        facts = read_config(name, [], H100)
    except KvtuneError:
        return "refuses"
    if "refused" in vllm:
        return "alone"
    planned = (facts.hit_tokens, len(facts.groups), facts.bytes_of_block)
    return "equal" if planned == (vllm["hit_unit"], vllm["groups"], vllm["block_bytes"]) else "differs"


def held_by(row: dict[str, Any]) -> str:
    """Letters for what says the same as this row: the simulator, the real engine with a tiny twin, arithmetic."""
    kinds = frozenset(kind for kind, _, _ in row["specs"])
    has_twin = kinds in TWINS and row["hit_unit"] == row["hash_unit"]
    return "S" + "E" * has_twin + "A" * (row["arithmetic"] == "equal")


def replayed(simulators: Simulators, names: list[str]) -> dict[str, dict[str, Any]]:
    """Replay the shapes with both cores."""
    workload = build(LOAD, seed=1)
    setups = [set_up(name, core) for name in names for core in CORES]
    outcomes = dict(simulators.run(on(workload, setups)))
    found = {}
    for number, name in enumerate(names):
        found[name] = answer(outcomes[2 * number], outcomes[2 * number + 1])
        found[name]["arithmetic"] = arithmetic(name, found[name])
    return found


def main(names: list[str]) -> int:
    version = check_engine().partition("+")[0]
    wanted = names or [name for name in SHAPES if name not in SHORT]
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with Simulators(platform=H100) as simulators:
        found = replayed(simulators, wanted)
    results[version] = {**results.get(version, {}), **found}
    RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    for name, row in found.items():
        print(name, json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
