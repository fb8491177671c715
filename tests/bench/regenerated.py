"""Chats in which some turns are answered again, as with a "regenerate" button: what the default hits beside stock.

    python tests/bench/regenerated.py [--loads 200] [--seed 0]

Loads are drawn by chance: conversations, lengths, share of turns that are answered twice, pool. The second answer comes
up to 20 s after the first, so that its conversation may have gone on by then. Prints the loads on which the default is
behind, in points of all prompt tokens, and how many. One process replays stock, and one the core: both patch vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from kvtune.sim.settings import SimSettings
from kvtune.workload.spec import build
from kvtune.workload.types import STREAM_ANSWER, Request, Workload
from tests.bench.loads import LONGEST, WINDOWS

Side = Literal["stock", "kvtune"]
WAITS_S = 20.0
ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Load:
    sessions: int
    turns: int
    system: int
    first: int
    user: int
    output: int
    concurrency: int
    think: int
    share: float
    """Of the turns that are answered again."""
    blocks: int
    seed: int = 0

    @property
    def spec(self) -> str:
        names = ("sessions", "turns", "system", "first", "user", "output", "concurrency", "think")
        return "chat:" + ",".join(f"{name}={getattr(self, name)}" for name in names)


def drawn(seed: int, number: int) -> Load:
    """A load that fits vLLM's longest prompt here, in a pool from a third of what all of it takes to more than that."""
    chance = random.Random(f"{seed}/{number}")
    while True:
        sessions, turns = chance.randint(15, 40), chance.randint(3, 8)
        system, first = chance.choice((16, 512, 1024)), chance.randint(300, 1800)
        user, output = chance.randint(30, 300), int(8 * 1.55 ** chance.uniform(0, 9))
        if system + first + turns * (user + output) < LONGEST - 192:
            break
    blocks_each = (system + first + turns / 2 * (user + output)) / 32 + 60
    return Load(
        sessions=sessions,
        turns=turns,
        system=system,
        first=first,
        user=user,
        output=output,
        concurrency=chance.choice((1, 2, 4, 8)),
        think=chance.choice((0, 2, 20)),
        share=chance.choice((0.05, 0.15, 0.3, 0.6, 1.0)),
        blocks=int(sessions * blocks_each * chance.uniform(0.35, 1.3)) + 200,
        seed=number,
    )


def regenerated(load: Load) -> Workload:
    """Behind each round of turns, some of them again. The conversation goes on behind the first answer."""
    chats, chance = build(load.spec, seed=load.seed), random.Random(load.seed)
    place: dict[int, int] = {}
    """Where a request of the chats is now."""
    requests: list[Request] = []
    again: list[int] = []

    def moved(request: Request) -> Request:
        spans = (
            span._replace(stream=STREAM_ANSWER + place[span.stream - STREAM_ANSWER])
            if span.stream >= STREAM_ANSWER
            else span
            for span in request.prompt
        )
        after = None if request.after is None else place[request.after]
        return dataclasses.replace(request, prompt=tuple(spans), after=after)

    for index, request in enumerate(chats.requests):
        place[index] = len(requests)
        requests.append(moved(request))
        if chance.random() < load.share:
            again.append(place[index])
        if (index + 1) % load.sessions == 0:
            for at in again:
                name, wait = f"{requests[at].id}-again", WAITS_S * chance.random()
                requests.append(
                    dataclasses.replace(requests[at], id=name, arrival_s=None, after=at, think_s=wait)
                )
            again = []
    return dataclasses.replace(chats, requests=tuple(requests), hash="regenerated")


def hit(load: Load, core: Side) -> float:
    """Percent of all prompt tokens."""
    from kvtune.sim.replay import replay  # imports vLLM, and only one side may be in a process

    flags = ["--num-gpu-blocks-override", str(load.blocks), "--block-size", "32"]
    settings = SimSettings(
        model=WINDOWS,
        mode="jump",
        token_rows=0,
        engine_args=[*flags, "--max-num-batched-tokens", "2048", "--max-model-len", str(LONGEST)],
        core=core,
    )
    requests = replay(regenerated(load), settings).table("requests")
    return float(100 * requests["hit_tokens"].sum() / requests["prompt_tokens"].sum())


def both(loads: list[Load]) -> list[tuple[float, float]]:
    """What stock and the core hit on each load."""
    text = json.dumps([dataclasses.asdict(load) for load in loads])

    def side(core: Side) -> list[float]:
        command = [sys.executable, "-m", "tests.bench.regenerated", "--side", core]
        done = subprocess.run(command, input=text, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise SystemExit(f"a replay failed:\n{done.stderr}")
        found: list[float] = json.loads(done.stdout.splitlines()[-1])
        return found

    with ThreadPoolExecutor() as threads:
        return list(zip(*threads.map(side, ("stock", "kvtune")), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--loads", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        loads = [Load(**each) for each in json.load(sys.stdin)]
        print(json.dumps([hit(load, options.side) for load in loads]))
        return 0
    loads = [drawn(options.seed, number) for number in range(options.loads)]
    found = zip(loads, both(loads), strict=True)
    rows = sorted(((ours - stock, stock, load) for load, (stock, ours) in found), key=lambda row: row[0])
    for lead, stock, load in rows:
        if lead < -1:
            print(f"{lead:5.1f}  stock {stock:.1f}  {load}")
    leads = [lead for lead, _, _ in rows]
    print(
        f"{len(leads)} loads: behind by more than a point on {sum(lead < -1 for lead in leads)}, "
        f"ahead on {sum(lead > 1 for lead in leads)}, {sum(leads) / len(leads):+.2f} points on average"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
