"""How many engines behind a router a load needs, by exact replays of fleets. In the CLI's process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtune.answers.capacity.replays import Bench, Window, figures
from kvtune.answers.capacity.result import FleetPoint, Replicas
from kvtune.answers.capacity.search import MET
from kvtune.base.errors import KvtuneError
from kvtune.data.run.extras import Router
from kvtune.data.run.types import Run
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.routing import fewest_replicas, replays_of
from kvtune.reading.analysis.fleet import fleet
from kvtune.reading.bounds.loads import possible_hits
from kvtune.requests.loads.spec import build, has_slots, with_keys
from kvtune.requests.types import Workload


@dataclass(frozen=True, slots=True)
class Fleets:
    """Who shares the load: 1 to `most` engines behind a router. `sessions`: at once; 0: the load as it is."""

    most: int
    router: Router
    sessions: int = 0


def needed(fleets: Fleets, bench: Bench, setup: Setup, keep: float, seeds: int) -> Replicas:
    """Return the fewest engines that keep the hits, and the limits, by seed. A load without slots has one seed."""
    spec, sessions = bench.spec, fleets.sessions
    if sessions:
        spec = with_keys(spec, sessions=sessions, hours=bench.hours)
    slots = has_slots(spec)
    ends = setup.replayed(end_s=bench.window.end_s if slots else 0.0, token_rows=0)
    by_seed: list[int] = []
    tried: list[FleetPoint] = []
    why_not = ""
    try:
        for seed in range(seeds if slots else 1):
            load = build(spec, seed=seed, tokenizer=bench.tokenizer, sources=bench.sources)

            def enough(run: Run, load: Workload = load, seed: int = seed) -> bool:
                window = bench.window if slots else Window(0.0, run.header.wall_s)
                bench.replays += 1
                tried.append(_point(run, load, bench, window, seed, keep))
                return tried[-1].enough

            replay = replays_of(bench.simulators, load, ends, fleets.router)
            by_seed.append(fewest_replicas(replay, enough, fleets.most).replicas)
    except KvtuneError as error:
        by_seed, why_not = [], error.message
    return Replicas(
        router=fleets.router,
        sessions=sessions,
        most=fleets.most,
        by_seed=by_seed,
        tried=sorted(tried, key=lambda point: point.replicas),
        why_not=why_not,
    )


def _point(run: Run, load: Workload, bench: Bench, window: Window, seed: int, keep: float) -> FleetPoint:
    possible = np.array(possible_hits(load.requests, bench.unit))
    replayed, shared = figures(run, window, possible, seed, bench.slo), fleet(run)
    return FleetPoint(
        replicas=run.header.engine.engines,
        seed=seed,
        enough=replayed.kept >= keep and (replayed.met is None or replayed.met >= MET),
        kept=replayed.kept,
        hit_rate=replayed.hit_rate,
        met=replayed.met,
        balance=shared.balance if shared is not None else 1.0,
        hit_rates=[replica.rate or 0.0 for replica in shared.replicas]
        if shared is not None
        else [replayed.hit_rate],
    )
