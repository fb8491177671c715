"""Loads for comparing eviction policies: a few kinds of traffic, mixed, as lines of a Mooncake trace; and their hits.

A load is plain data, {"model", "blocks", "seed", "parts": [{"kind", ..}, ..]}. Parts overlap in time from their
`start_s`. Lengths are in nodes of 512 tokens.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from kvtune.base.errors import KvtuneError
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from kvtune.reading.analysis.cache import prefix_cache
from kvtune.requests.loads.spec import build
from tests.simulator import on

NODE = 512
LONGEST = 8192
RETENTION = ("0", "None", "512", "1024", "2048")
"""0 is stock's default."""
WINDOWS, PLAIN = "tiny-gemma3", "tiny-llama"
OURS = "first"

Load = dict[str, Any]
Sent = tuple[float, list[int], int]
"""When (s), the prompt's nodes, tokens of the last node."""


def _sessions(part: Load, chance: random.Random, fresh: Iterator[int]) -> Iterator[Sent]:
    """Conversations that start one after another; each turn sends all before it again."""
    for session in range(part["sessions"]):
        at, nodes = session * part["every_s"], list[int]()
        for _ in range(part["turns"]):
            nodes = nodes + [next(fresh) for _ in range(part["new"])]
            yield at, nodes, NODE
            at += part["think_s"] * (0.4 + 1.2 * chance.random())


def _phases(part: Load, chance: random.Random, fresh: Iterator[int]) -> Iterator[Sent]:
    """Prefixes drawn by popularity, each with a new suffix; after `stays` requests other prefixes are hot."""
    weights = [1 / (rank + 1) ** part["skew"] for rank in range(part["hot"])]
    at = 0.0
    for number in range(part["requests"]):
        if number % part["stays"] == 0:
            hot = [[next(fresh) for _ in range(part["nodes"])] for _ in range(part["hot"])]
        yield at, [*chance.choices(hot, weights)[0], next(fresh)], part["suffix"]
        at += part["every_s"]


def _visits(part: Load, chance: random.Random, fresh: Iterator[int]) -> Iterator[Sent]:
    """Each prompt comes `times` times, `apart` requests of the others between, and never again."""
    for number in range(part["prompts"]):
        nodes = [next(fresh) for _ in range(part["nodes"])]
        for visit in range(part["times"]):
            yield (number + visit * (part["apart"] + 0.5)) * part["every_s"], nodes, part["suffix"]


def _asked(part: Load, chance: random.Random, fresh: Iterator[int]) -> Iterator[Sent]:
    """Prefixes that are sent alone first, to warm them up, and then `times` times with a new question behind each."""
    for number in range(part["prefixes"]):
        nodes = [next(fresh) for _ in range(part["nodes"])]
        yield number * part["every_s"], [*nodes, next(fresh)], 1
        for visit in range(1, part["times"] + 1):
            at = (number + visit * (part["apart"] + 0.5)) * part["every_s"]
            yield at, [*nodes, next(fresh)], part["suffix"]


def _scan(part: Load, chance: random.Random, fresh: Iterator[int]) -> Iterator[Sent]:
    """The same prefixes in turn, again and again, each time with a new suffix."""
    prefixes = [[next(fresh) for _ in range(part["nodes"])] for _ in range(part["prefixes"])]
    for number in range(part["prefixes"] * part["rounds"]):
        yield number * part["every_s"], [*prefixes[number % part["prefixes"]], next(fresh)], part["suffix"]


def _cold(part: Load, chance: random.Random, fresh: Iterator[int]) -> Iterator[Sent]:
    """Prompts that never come again."""
    for number in range(part["requests"]):
        yield number * part["every_s"], [next(fresh) for _ in range(part["nodes"])], NODE


KINDS: dict[str, Callable[[Load, random.Random, Iterator[int]], Iterator[Sent]]] = {
    "sessions": _sessions,
    "phases": _phases,
    "visits": _visits,
    "asked": _asked,
    "scan": _scan,
    "cold": _cold,
}


def lines(load: Load) -> list[dict[str, Any]]:
    """The load's requests in order of time, without those that are longer than LONGEST."""
    fresh, found = count(1), []
    for number, part in enumerate(load["parts"]):
        chance = random.Random(f"{load['seed']}/{number}")
        for at, nodes, last in KINDS[part["kind"]](part, chance, fresh):
            found.append(
                {
                    "timestamp": round(1000 * (part["start_s"] + at)),
                    "input_length": NODE * (len(nodes) - 1) + last,
                    "output_length": part["output"],
                    "hash_ids": nodes,
                }
            )
    fitting = [line for line in found if line["input_length"] + line["output_length"] <= LONGEST]
    return sorted(fitting, key=lambda line: line["timestamp"])


def write(load: Load, folder: Path) -> str:
    """The load as a trace in a folder; the workload's spec."""
    text = "".join(json.dumps(line) + "\n" for line in lines(load))
    file = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    file.write_text(text)
    return f"trace:path={file}"


def columns(model: str, blocks: int, policies: Sequence[str], length: int = 0) -> dict[str, Setup]:
    """Stock, with each retention where the model has windows, and the core's policies."""
    flags = [
        "--num-gpu-blocks-override",
        str(blocks),
        "--block-size",
        "32",
        "--max-num-batched-tokens",
        "2048",
    ]
    if length:
        flags += ["--max-model-len", str(length)]

    def side(*more: str, **core: Any) -> Setup:
        return Setup(model=model, engine_args=[*flags, *more], device=Simulated(token_rows=0), **core)

    kept = RETENTION if model == WINDOWS else ("0",)
    found = {f"stock {value}": side("--prefix-cache-retention-interval", value) for value in kept}
    for policy in policies:
        settings: dict[str, Any] = {"policy": policy}
        if policy == "two_class":
            settings["reuse_bonus_s"] = 1e9  # LRU otherwise: it has no order until it is tuned
        found[policy] = side(core="kvtune", core_settings=settings)
    return found


def measure(spec: str, sides: dict[str, Setup], simulators: Simulators, seed: int = 0) -> dict[str, float]:
    """Percent of the tokens that can hit, by column; `hittable` is how many these are, in percent of all."""
    work = build(spec, seed=seed)
    names, found = list(sides), {}
    for number, outcome in simulators.run(on(work, list(sides.values()))):
        if isinstance(outcome, KvtuneError):
            raise outcome
        core = outcome.header.core
        if sides[names[number]].core == "kvtune" and (
            not core.active or core.counters.get("pool_failures", 0)
        ):
            raise KvtuneError(f"the core did not run: {core.why or core.counters}", "see the run's notes")
        cache = prefix_cache(outcome, work)
        can = cache.hit_tokens + cache.misses["not_cached"]
        found[names[number]] = 100 * cache.hit_tokens / max(1, can)
        found["hittable"] = 100 * can / max(1, cache.query_tokens)
    return {name: found[name] for name in (*names, "hittable")}


def best_of_stock(row: dict[str, float]) -> float:
    return max(value for name, value in row.items() if name.startswith("stock"))
