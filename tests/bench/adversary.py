"""A search for loads on which the core's default policy hits less than stock. Prints the worst ten.

    python tests/bench/adversary.py [--model tiny-gemma3|tiny-llama] [--trials 2000] [--against best|default]
                                    [--near FILE | --chats]

An optimizer (Optuna's TPE, seeded) puts loads together from sessions, phases, visits, warm-ups, scans and cold prompts
(loads.py) and maximizes the points, of the tokens that can hit, by which the best of stock's settings (plain models:
its LRU), or stock with its default flags alone, beats the policy. Loads of which less than a quarter can hit count as
0: a point of them is a request or two. `--near FILE` looks beside loads that are known (worst_loads.json): it tries
these, then changed copies of the worst that it has seen. `--chats` searches among chats whose next turn holds what the
engine answered. Every trial is a line of the journal, and the same command
goes on behind the last. `--worst FILE` adds the worst ten to a file of loads.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any, Protocol

import optuna

sys.path.insert(0, str(Path(__file__).parents[2]))

from kvtune.sim.simulators import Simulators
from tests.bench.loads import (
    LONGEST,
    NODE,
    OURS,
    PLAIN,
    WINDOWS,
    Load,
    best_of_stock,
    columns,
    measure,
    requests,
    write,
)

ROOT = Path(__file__).parents[2]
JOURNALS = ROOT / "reports"
REQUESTS = 400
"""Of a load at most, so that a trial takes seconds."""
FEWEST, LEAST_HITTABLE = 100, 25.0
SEEN = 0.5
"""Where the policy hits all but so many points, stock's other settings are not asked."""
BEST, DEFAULT = "best", "default"
KIND = ("none", "sessions", "phases", "visits", "asked", "scan", "cold")
PARENTS = 20
"""Of so many of the worst loads, changed copies are tried."""
STARTS_S = (0.0, 100.0, 400.0)


def suggest(trial: optuna.trial.BaseTrial, model: str) -> Load:
    """A load of one to three parts in a pool of 600 to 6,000 blocks of 32."""
    parts = []
    for number in range(3):
        kind = trial.suggest_categorical(f"kind{number}", KIND[number > 0 :] if not number else KIND)
        if kind != "none":
            parts.append({"kind": kind, **_part(trial, f"{kind}{number}.", str(kind))})
    least = 700 if model == WINDOWS else 300
    blocks = int(least * trial.suggest_float("pool", 1.0, 10.0, log=True))
    return {
        "model": model,
        "blocks": blocks,
        "seed": trial.suggest_int("seed", 0, 3),
        "parts": parts or [_idle()],
    }


def suggest_chats(trial: optuna.trial.BaseTrial, model: str) -> Load:
    """Chats in a pool of a third of what they need to all of it."""

    def whole(key: str, low: int, high: int) -> int:
        return int(trial.suggest_int(key, low, high, log=True))

    chats = {
        "sessions": whole("sessions", 25, 50),
        "turns": whole("turns", 4, 8),
        "system": trial.suggest_categorical("system", (16, 512, 1024)),
        "first": whole("first", 50, 2000),
        "user": whole("user", 20, 300),
        "output": whole("output", 4, 300),
        "concurrency": whole("concurrency", 1, 8),
        "think": trial.suggest_categorical("think", (0, 2, 20)),
    }
    longest = chats["system"] + chats["first"] + chats["turns"] * (chats["user"] + chats["output"])
    copies = 1.9 if model == WINDOWS else 1.0
    needed = copies * chats["sessions"] * longest / 32
    least = 700 if model == WINDOWS else 300
    return {
        "model": model,
        "blocks": max(least, int(needed * trial.suggest_float("pool", 0.3, 1.1))),
        "seed": trial.suggest_int("seed", 0, 3),
        "chats": "chat:" + ",".join(f"{name}={value}" for name, value in chats.items()),
    }


def _idle() -> dict[str, Any]:
    return {"kind": "cold", "requests": 1, "nodes": 1, "every_s": 1.0, "start_s": 0.0, "output": 1}


def _part(trial: optuna.trial.BaseTrial, name: str, kind: str) -> dict[str, Any]:
    def whole(key: str, low: int, high: int) -> int:
        return int(trial.suggest_int(name + key, low, high, log=True))

    def real(key: str, low: float, high: float) -> float:
        return round(trial.suggest_float(name + key, low, high, log=True), 3)

    part: dict[str, Any] = {
        "every_s": real("every_s", 0.5, 20.0),
        "start_s": trial.suggest_categorical(name + "start_s", STARTS_S),
        "output": whole("output", 1, 256),
    }
    if kind == "sessions":
        part |= {
            "sessions": whole("sessions", 10, 80),
            "turns": whole("turns", 2, 8),
            "new": whole("new", 1, 3),
        }
        return part | {"think_s": real("think_s", 2.0, 100.0)}
    part["nodes"] = whole("nodes", 1, 9)
    if kind == "cold":
        return part | {"requests": whole("requests", 20, 200)}
    part["suffix"] = whole("suffix", 16, NODE)
    if kind == "phases":
        part |= {
            "hot": whole("hot", 2, 60),
            "requests": whole("requests", 50, 400),
            "stays": whole("stays", 20, 400),
        }
        return part | {"skew": trial.suggest_float(name + "skew", 0.0, 1.5)}
    if kind == "visits":
        part |= {"prompts": whole("prompts", 20, 200), "times": whole("times", 2, 4)}
        return part | {"apart": whole("apart", 1, 60)}
    if kind == "asked":
        part |= {"prefixes": whole("prefixes", 5, 100), "times": whole("times", 1, 4)}
        return part | {"apart": whole("apart", 1, 60)}
    return part | {"prefixes": whole("prefixes", 2, 60), "rounds": whole("rounds", 2, 8)}


def value_of(
    load: Load, policy: str, folder: Path, simulators: Simulators, against: str = BEST
) -> tuple[float, dict[str, float]]:
    """Points that stock's best, or its default, is ahead of the policy, and the columns that were asked for."""
    if not FEWEST <= requests(load) <= REQUESTS:
        return 0.0, {}
    sides = columns(load["model"], load["blocks"], [policy], LONGEST)
    spec = write(load, folder)
    first = {name: sides.pop(name) for name in (policy, "stock 0")}
    row = measure(spec, first, simulators, load["seed"])
    if row["hittable"] < LEAST_HITTABLE:
        return 0.0, row
    if against == BEST and sides and row[policy] < 100.0 - SEEN:
        row |= measure(spec, sides, simulators, load["seed"])
    return best_of_stock(row) - row[policy], row


Trial = dict[str, Any]
"""A line of the journal: value, load, row, and what the proposer wants to know again."""


class Proposer(Protocol):
    def ask(self) -> Trial: ...
    def tell(self, trial: Trial) -> None: ...


class Optimizer:
    """Loads of the whole grammar, or chats, by Optuna's TPE."""

    def __init__(self, model: str, seed: int, done: list[Trial], chats: bool = False) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self.model = model
        self.suggest = suggest_chats if chats else suggest
        sampler = optuna.samplers.TPESampler(seed=seed + len(done))
        self.study = optuna.create_study(direction="maximize", sampler=sampler)
        for trial in done:
            self.study.enqueue_trial(trial["params"])
            self.ask()
            self.tell(trial)

    def ask(self) -> Trial:
        self.asked = self.study.ask()
        load = self.suggest(self.asked, self.model)
        return {"load": load, "params": self.asked.params}

    def tell(self, trial: Trial) -> None:
        self.study.tell(self.asked, trial["value"])


class Neighbours:
    """Known loads first, then changed copies of the worst seen."""

    def __init__(self, known: list[Load], seed: int, done: list[Trial]) -> None:
        self.chance = random.Random(seed + len(done))
        self.untried = known[len(done) :]
        self.seen = list(done)

    def ask(self) -> Trial:
        if self.untried:
            return {"load": self.untried.pop(0)}
        worst = sorted(self.seen, key=lambda trial: -trial["value"])[:PARENTS]
        parent, other = self.chance.choice(worst), self.chance.choice(worst)
        return {"load": changed(parent["load"], other["load"], self.chance)}

    def tell(self, trial: Trial) -> None:
        self.seen.append(trial)


def changed(load: Load, other: Load, chance: random.Random) -> Load:
    """A copy with some numbers up or down, and now and then a part of the other load in place of one of its own."""
    load = copy.deepcopy(load)

    def near(value: float, spread: float) -> float:
        return value * chance.lognormvariate(0.0, spread)

    load["blocks"] = int(near(load["blocks"], 0.1))
    if chance.random() < 0.3:
        load["seed"] = chance.randrange(4)
    parts = load["parts"]
    if chance.random() < 0.2:
        parts[chance.randrange(len(parts))] = copy.deepcopy(chance.choice(other["parts"]))
    for part in parts:
        for key, value in part.items():
            if key == "kind" or chance.random() < 0.6:
                continue
            if key == "start_s":
                part[key] = chance.choice(STARTS_S)
            elif isinstance(value, int):
                part[key] = max(1, round(near(value, 0.25)))
            else:
                part[key] = round(near(value, 0.25), 3)
        if "suffix" in part:
            part["suffix"] = min(part["suffix"], NODE)
    return load


def search(
    model: str,
    policy: str,
    trials: int,
    seed: int,
    journal: Path,
    parallel: int = 2,
    say: Any = None,
    against: str = BEST,
    known: list[Load] | None = None,
    chats: bool = False,
) -> list[Trial]:
    """All trials of the journal, the worst load first; goes on until there are `trials` of them."""
    done = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    proposer: Proposer = Neighbours(known, seed, done) if known else Optimizer(model, seed, done, chats)
    with tempfile.TemporaryDirectory(prefix="loads-") as name, Simulators(parallel) as simulators:
        while len(done) < trials:
            trial = proposer.ask()
            value, row = value_of(trial["load"], policy, Path(name), simulators, against)
            trial |= {"value": value, "row": row}
            proposer.tell(trial)
            done.append(trial)
            with journal.open("a") as file:
                file.write(json.dumps(trial) + "\n")
            if say is not None:
                say(len(done), max(one["value"] for one in done), value)
    return sorted(done, key=lambda trial: -trial["value"])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=WINDOWS, choices=(WINDOWS, PLAIN))
    parser.add_argument("--trials", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default=OURS)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--against", default=BEST, choices=(BEST, DEFAULT), help="stock's settings")
    among = parser.add_mutually_exclusive_group()
    among.add_argument("--near", type=Path, help="a file of loads: look beside these")
    among.add_argument("--chats", action="store_true", help="chats whose next turn holds what was answered")
    parser.add_argument(
        "--journal", type=Path, help="default: reports/adversary-MODEL-POLICY-AGAINST[-near|-chats].jsonl"
    )
    parser.add_argument("--worst", type=Path, help="a file of loads that the worst ten are added to")
    options = parser.parse_args()
    where = "-near" if options.near else "-chats" if options.chats else ""
    name = f"adversary-{options.model}-{options.policy}-{options.against}{where}.jsonl"
    known = json.loads(options.near.read_text()) if options.near else []
    known = [load for load in known if load["model"] == options.model and "parts" in load]
    if options.near and not known:
        parser.error(f"{options.near} has no load of {options.model}")
    journal = options.journal or JOURNALS / name

    def say(number: int, worst: float, value: float) -> None:
        if number % 20 == 0:
            print(f"{number} trials, the worst so far: {worst:.1f} points", flush=True)

    found = search(
        options.model,
        options.policy,
        options.trials,
        options.seed,
        journal,
        options.parallel,
        say,
        options.against,
        known,
        options.chats,
    )
    for record in found[:10]:
        print(f"{record['value']:6.2f}  {json.dumps(record['load'])}")
    if options.worst:
        kept = json.loads(options.worst.read_text()) if options.worst.exists() else []
        kept += [record["load"] for record in found[:10] if record["load"] not in kept]
        options.worst.write_text(json.dumps(kept, indent=1) + "\n")
    return 1 if found and found[0]["value"] > 1.0 else 0


if __name__ == "__main__":
    sys.exit(main())
