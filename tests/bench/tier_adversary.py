"""A search for loads on which kvtune's policy of a tier of host memory hits less than vLLM's. Prints the worst ten.

    python tests/bench/tier_adversary.py [--model tiny-llama|tiny-gemma3] [--trials 500] [--seed 0]

As adversary.py: an optimizer puts loads together and chooses a tier of one to eight pools; it maximizes the points, of
the tokens that can hit, by which the better of `lru` and `arc` beats `kvtune`, pool and tier together. Every trial is a
line of the journal, and the same command goes on behind the last. `--worst FILE` adds the worst ten to a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import optuna

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvtune.device.copies import GIB
from kvtune.sim.settings import SimSettings
from kvtune.sim.simulators import Simulators
from tests.bench.adversary import FEWEST, JOURNALS, LEAST_HITTABLE, REQUESTS, SEEN, suggest
from tests.bench.loads import LONGEST, PLAIN, WINDOWS, Load, columns, lines, measure, write

OURS, STOCK = "kvtune", ("lru", "arc")
BLOCK_BYTES = {PLAIN: 32_768, WINDOWS: 32_768}
"""Of a block of 32 tokens."""
TIMES = (1, 2, 4, 8)


def side(load: Load, policy: str) -> SimSettings:
    """The engine with a tier of `times` pools and this eviction policy; stock's core."""
    plain = columns(load["model"], load["blocks"], [], LONGEST)["stock 0"]
    size = load["times"] * load["blocks"] * BLOCK_BYTES[load["model"]] / GIB
    extra = {"kv_connector_extra_config": {"eviction_policy": policy}}
    flags = ["--kv-offloading-size", str(size), "--kv-transfer-config", json.dumps(extra)]
    return msgspec.structs.replace(plain, engine_args=[*plain.engine_args, *flags])


def behind(load: Load, folder: Path, simulators: Simulators) -> tuple[float, dict[str, float]]:
    """Points that the better of vLLM's policies is ahead of ours, and the hit rates of each."""
    if not FEWEST <= len(lines(load)) <= REQUESTS:
        return 0.0, {}
    spec = write(load, folder)
    row = measure(spec, {name: side(load, name) for name in (OURS, "lru")}, simulators, load["seed"])
    if row["hittable"] < LEAST_HITTABLE:
        return 0.0, row
    if row[OURS] < 100.0 - SEEN:
        row |= measure(spec, {"arc": side(load, "arc")}, simulators, load["seed"])
    return max(row.get(name, 0.0) for name in STOCK) - row[OURS], row


def search(
    model: str, trials: int, seed: int, journal: Path, parallel: int = 2, say: Any = None
) -> list[dict[str, Any]]:
    """All trials of the journal, the worst load first; goes on until there are `trials` of them."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    done = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed + len(done))
    )

    def load_of(trial: optuna.trial.Trial) -> Load:
        return {**suggest(trial, model), "times": trial.suggest_categorical("times", TIMES)}

    for record in done:
        study.enqueue_trial(record["params"])
        trial = study.ask()
        load_of(trial)
        study.tell(trial, record["value"])
    with tempfile.TemporaryDirectory(prefix="loads-") as name, Simulators(parallel) as simulators:
        while len(done) < trials:
            trial = study.ask()
            load = load_of(trial)
            value, row = behind(load, Path(name), simulators)
            study.tell(trial, value)
            done.append({"value": value, "params": trial.params, "load": load, "row": row})
            with journal.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            if say is not None:
                say(len(done), max(record["value"] for record in done))
    return sorted(done, key=lambda record: -record["value"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=PLAIN, choices=(PLAIN, WINDOWS))
    parser.add_argument("--trials", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--journal", type=Path, help="default: reports/tier-adversary-MODEL.jsonl")
    parser.add_argument("--worst", type=Path, help="a file of loads that the worst ten are added to")
    options = parser.parse_args()
    journal = options.journal or JOURNALS / f"tier-adversary-{options.model}.jsonl"

    def say(number: int, worst: float) -> None:
        if number % 20 == 0:
            print(f"{number} trials, the worst so far: {worst:.1f} points", flush=True)

    found = search(options.model, options.trials, options.seed, journal, options.parallel, say)
    for record in found[:10]:
        print(f"{record['value']:6.2f}  {json.dumps(record['row'])}  {json.dumps(record['load'])}")
    hit = [record for record in found if record["row"].get("hittable", 0.0) >= LEAST_HITTABLE]
    ahead = sum(record["value"] < -0.5 for record in hit)
    print(f"{len(hit)} loads that can hit; kvtune is more than half a point ahead on {ahead} of them")
    if options.worst:
        kept = json.loads(options.worst.read_text()) if options.worst.exists() else []
        kept += [record["load"] for record in found[:10] if record["load"] not in kept]
        options.worst.write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
