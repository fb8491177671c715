"""Engines that shared a load: what each did, how even that was, what another routing hits. Run -> Fleet. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvtune.data.run.engines import of_engine, ranks, served_by
from kvtune.data.run.extras import OtherRouting
from kvtune.data.run.types import Run, hits_of, untimed
from kvtune.data.tally import Hits

AS_ROUTED = "as routed"
ONE_CACHE = "one cache for all"


class Replica(Hits, frozen=True, kw_only=True):
    """One engine's part. `busy_share`: steps' share of its time."""

    replica: int
    requests: int
    output_tokens: int
    preemptions: int
    busy_share: float | None


@dataclass(frozen=True, slots=True)
class Fleet:
    """`router`: how requests were routed; "": not known. `others`: the load with other routers, and in one cache."""

    router: str
    replicas: tuple[Replica, ...]
    others: tuple[OtherRouting, ...]

    @property
    def hits(self) -> Hits:
        return Hits(
            sum(replica.query_tokens for replica in self.replicas),
            sum(replica.hit_tokens for replica in self.replicas),
        )

    @property
    def balance(self) -> float | None:
        """The most prompt tokens that an engine computed, divided by the mean; 1: all computed as many."""
        computed = [replica.missed for replica in self.replicas]
        return max(computed) * len(computed) / sum(computed) if sum(computed) else None

    @property
    def best(self) -> OtherRouting | None:
        """The other router that hits most, if it hits more."""
        routers = [other for other in self.others if other.router != ONE_CACHE and not other.error]
        best = max(routers, key=lambda router: router.hit_tokens, default=None)
        return best if best is not None and best.hit_tokens > self.hits.hit_tokens else None

    @property
    def one_cache(self) -> OtherRouting | None:
        return next((other for other in self.others if other.router == ONE_CACHE and not other.error), None)

    def plain(self) -> dict[str, Any]:
        replicas = [
            msgspec.to_builtins(replica)
            | {
                "prompt_tokens": replica.query_tokens,
                "computed_tokens": replica.missed,
                "hit_rate": replica.rate,
            }
            for replica in self.replicas
        ]
        return {
            "router": self.router,
            "replicas": replicas,
            "balance": self.balance,
            "others": msgspec.to_builtins(self.others),
        }


def fleet(run: Run) -> Fleet | None:
    """Return what each engine did; None for a run of one."""
    numbers = ranks(run)
    if len(numbers) == 1:
        return None
    info = run.header.extra.fleet
    router, others = ("", ()) if info is None else (info.router, info.others)
    return Fleet(
        AS_ROUTED if router == "given" else router,
        tuple(_replica(run, rank) for rank in numbers),
        tuple(msgspec.structs.replace(other, router=other.router or ONE_CACHE) for other in others),
    )


def _replica(run: Run, rank: int) -> Replica:
    table = run.table("requests")
    mine = served_by(run, rank) & np.isfinite(table["sent_s"])
    hits = hits_of(table, mine)
    steps = of_engine(run, rank).table("steps")["step_us"]
    wall_us = run.header.wall_s * 1e6
    return Replica(
        hits.query_tokens,
        hits.hit_tokens,
        replica=rank,
        requests=int(mine.sum()),
        output_tokens=int(table["output_tokens"][mine].sum()),
        preemptions=int(table["preemptions"][mine].sum()),
        busy_share=min(1.0, float(steps.sum()) / wall_us)
        if len(steps) and wall_us and not untimed(run.header)
        else None,
    )
