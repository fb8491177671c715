"""How many engines behind a router a load needs, by exact replays of fleets. In the CLI's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvtune.answers.capacity.estimate import Window
from kvtune.answers.capacity.replays import Bench, Task, figures, met
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


def needed(
    fleets: Fleets,
    bench: Bench,
    setup: Setup,
    unit: int,
    *,
    keep: float,
    slo: Mapping[str, float],
    seeds: int,
) -> Replicas:
    """Return the fewest engines that keep the hits, and the limits, by seed. A load without slots has one seed."""
    spec = (
        with_keys(bench.spec, sessions=fleets.sessions, hours=bench.hours) if fleets.sessions else bench.spec
    )
    slots = has_slots(spec)
    by_seed: list[int] = []
    tried: dict[int, list[FleetPoint]] = {}
    why_not = ""
    try:
        for seed in range(seeds if slots else 1):
            load = build(spec, seed=seed, tokenizer=bench.tokenizer, sources=bench.sources)
            ends = setup.replayed(end_s=bench.window.end_s if slots else 0.0, token_rows=0)

            def enough(run: Run, load: Workload = load, seed: int = seed) -> bool:
                window = bench.window if slots else Window(0.0, run.header.wall_s)
                bench.made += 1
                point = _point(run, load, window, unit, seed, keep, slo)
                tried.setdefault(point.replicas, []).append(point)
                return point.enough

            fewest = fewest_replicas(
                replays_of(bench.simulators, load, ends, fleets.router), enough, fleets.most
            )
            by_seed.append(fewest.replicas)
    except KvtuneError as error:
        why_not = error.message
    return Replicas(
        router=fleets.router,
        sessions=fleets.sessions,
        most=fleets.most,
        by_seed=[] if why_not else by_seed,
        tried=[point for _, points in sorted(tried.items()) for point in points],
        why_not=why_not,
    )


def _point(
    run: Run,
    load: Workload,
    window: Window,
    unit: int,
    seed: int,
    keep: float,
    slo: Mapping[str, float],
) -> FleetPoint:
    seed_figures = figures(
        run, load, window, np.array(possible_hits(load.requests, unit)), Task(0, seed, Setup(model=""))
    )
    within = met(run, window, slo) if slo else None
    shared = fleet(run)
    return FleetPoint(
        replicas=run.header.engine.engines,
        seed=seed,
        enough=seed_figures.kept >= keep and (within is None or within >= MET),
        kept=seed_figures.kept,
        hit_rate=seed_figures.hit_rate,
        met=within,
        balance=shared.balance if shared is not None else 1.0,
        hit_rates=[replica.rate or 0.0 for replica in shared.replicas]
        if shared is not None
        else [seed_figures.hit_rate],
    )
