"""Engines that shared a load: what each did, how even that was, what another routing hits. Run -> Fleet. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kvtune.run.engines import of_engine, ranks, served_by
from kvtune.run.types import Run, untimed

AS_ROUTED = "as routed"
ONE_CACHE = "one cache for all"


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine's part. `computed_tokens`: prompt tokens without hits. `busy_share`: steps' share of its time."""

    replica: int
    requests: int
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    preemptions: int
    busy_share: float | None

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.hit_tokens

    @property
    def hit_rate(self) -> float | None:
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else None


@dataclass(frozen=True, slots=True)
class Routed:
    """The hits of the same load with another router, or in one cache of all engines' size."""

    router: str
    hit_tokens: int
    query_tokens: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    """`router`: how requests were routed; "": not known. `others`: the load with other routers, and in one cache."""

    router: str
    replicas: tuple[Replica, ...]
    others: tuple[Routed, ...]

    @property
    def hit_tokens(self) -> int:
        return sum(one.hit_tokens for one in self.replicas)

    @property
    def query_tokens(self) -> int:
        return sum(one.prompt_tokens for one in self.replicas)

    @property
    def balance(self) -> float | None:
        """The most prompt tokens that an engine computed, divided by the mean; 1: all computed as many."""
        computed = [one.computed_tokens for one in self.replicas]
        return max(computed) * len(computed) / sum(computed) if sum(computed) else None

    @property
    def best(self) -> Routed | None:
        """The other router that hits most, if it hits more."""
        routers = [one for one in self.others if one.router != ONE_CACHE and not one.error]
        best = max(routers, key=lambda one: one.hit_tokens, default=None)
        return best if best is not None and best.hit_tokens > self.hit_tokens else None

    @property
    def one_cache(self) -> Routed | None:
        return next((one for one in self.others if one.router == ONE_CACHE and not one.error), None)

    def plain(self) -> dict[str, Any]:
        replicas = [
            asdict(one) | {"computed_tokens": one.computed_tokens, "hit_rate": one.hit_rate}
            for one in self.replicas
        ]
        return {
            "router": self.router,
            "replicas": replicas,
            "balance": self.balance,
            "others": [asdict(one) for one in self.others],
        }


def fleet(run: Run) -> Fleet | None:
    """Return what each engine did; None for a run of one."""
    numbers = ranks(run)
    if len(numbers) == 1:
        return None
    info = run.header.extra.fleet
    others = () if info is None else info.others
    return Fleet(
        "" if info is None else AS_ROUTED if info.router == "given" else info.router,
        tuple(_replica(run, rank) for rank in numbers),
        tuple(Routed(one.router or ONE_CACHE, one.hit_tokens, one.query_tokens, one.error) for one in others),
    )


def _replica(run: Run, rank: int) -> Replica:
    table = run.table("requests")
    mine = served_by(run, rank) & np.isfinite(table["sent_s"])
    known = mine & (table["hit_tokens"] >= 0)
    steps = of_engine(run, rank).table("steps")["step_us"]
    wall_us = run.header.wall_s * 1e6
    return Replica(
        rank,
        int(mine.sum()),
        int(table["prompt_tokens"][known].sum()),
        int(table["hit_tokens"][known].sum()),
        int(table["output_tokens"][mine].sum()),
        int(table["preemptions"][mine].sum()),
        min(1.0, float(steps.sum()) / wall_us)
        if len(steps) and wall_us and not untimed(run.header)
        else None,
    )
