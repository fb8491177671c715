"""How many engines behind a router a load needs: the fewest that are enough, by exact replays of fleets. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvtune.answers.capacity.replays import Bench, Seed, Task
from kvtune.answers.capacity.result import FleetPoint, Replicas
from kvtune.answers.capacity.search import MET
from kvtune.base.errors import KvtuneError
from kvtune.data.run.extras import Router
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.spec import has_slots


@dataclass(frozen=True, slots=True)
class Fleets:
    """Who shares the load: 1 to `most` engines behind a router. `sessions`: at once; 0: the load as it is."""

    most: int
    router: Router
    sessions: int = 0


@dataclass(slots=True)
class Fewest:
    """One seed's search for the fewest engines that are enough, taken that more never do worse."""

    most: int
    low: int = 0
    """The most that were not enough."""
    high: int = 0
    """The fewest that were; 0: none were."""
    running: bool = False

    @property
    def is_found(self) -> bool:
        return self.high - self.low == 1 or self.low == self.most

    def next(self, usual: int) -> int:
        """Return the number to replay next: 1, 2, 4 .., then between two. `usual`: what is enough with another seed."""
        if not self.high:
            return usual if usual > self.low else min(max(1, 2 * self.low), self.most)
        return usual - 1 if self.low < usual - 1 < self.high == usual else (self.low + self.high) // 2

    def add(self, replicas: int, enough: bool) -> None:
        self.running = False
        self.low, self.high = (self.low, replicas) if enough else (replicas, self.high)


def needed(fleets: Fleets, bench: Bench, setup: Setup, keep: float, seeds: int) -> Replicas:
    """Return the fewest engines that keep the hits, and the limits, by seed. A load without slots has one seed."""
    searches = [Fewest(fleets.most) for _ in range(seeds if fleets.sessions or has_slots(bench.spec) else 1)]
    tried: list[FleetPoint] = []

    def wanted() -> Task | None:
        usual = next((search.high for search in searches if search.is_found), 0)
        for seed, search in enumerate(searches):
            if not (search.running or search.is_found):
                search.running = True
                return Task(fleets.sessions, seed, setup, replicas=search.next(usual), router=fleets.router)
        return None

    def ended(task: Task) -> None:
        tried.append(_point(task, bench, keep))
        searches[task.seed].add(task.replicas, tried[-1].enough)

    why_not = ""
    try:
        bench.run(wanted, ended)
    except KvtuneError as error:
        why_not = error.message
    return Replicas(
        router=fleets.router,
        sessions=fleets.sessions,
        most=fleets.most,
        by_seed=[] if why_not else [search.high for search in searches],
        tried=sorted(tried, key=lambda point: (point.replicas, point.seed)),
        why_not=why_not,
    )


def _point(task: Task, bench: Bench, keep: float) -> FleetPoint:
    seed, shared = bench.made[task], bench.fleets[task]
    assert isinstance(seed, Seed)
    return FleetPoint(
        replicas=task.replicas,
        seed=task.seed,
        enough=seed.kept >= keep and (seed.met is None or seed.met >= MET),
        kept=seed.kept,
        hit_rate=seed.hit_rate,
        met=seed.met,
        balance=shared.balance if shared is not None else 1.0,
        hit_rates=[each.rate or 0.0 for each in shared.replicas] if shared is not None else [seed.hit_rate],
    )
