"""Which replicas share a load, how it is routed, and what another routing would hit. In the CLI's process.

Imports no vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.run.extras import GIVEN, MOST_REPLICAS, ROUTERS, FleetInfo, OtherRouting, Router
from kvtune.data.run.types import Run, hits_of
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.simulators import Simulators
from kvtune.lab.sim.worker import Report
from kvtune.requests.types import Workload

USUAL: Router = "least-busy"
"""The router if the user names none: vLLM's own."""

STEP_TIMES = (
    "step_us",
    "prefill_token_us",
    "decode_us",
    "kv_token_us",
    "prefill_step_us",
    "prefill_kv_us",
    "between_us",
)


class Routing(NamedTuple):
    """As in `Simulated`."""

    replicas: int = 1
    router: Router = ""
    routed: list[int] = []  # never changed

    def of(self, setup: Setup) -> Setup:
        return setup.replayed(**self._asdict())


def routing(workload: Workload, replicas: int = 0, router: Router = "") -> Routing:
    """Return how the load is shared. 0 replicas and no router: as its log says, else one engine."""
    named = [request.replica for request in workload.requests]
    logged = 1 + max(named, default=-1)
    if logged and min(named) < 0:
        if not replicas and not router:
            raise UsageError(
                f"{sum(engine < 0 for engine in named)} of the log's {len(named)} requests name no replica, others do",
                "-w requests:path=LOG,routed=1 leaves them out; profile --on sim also takes --replicas N --router NAME",
            )
        logged = 0
    if logged and not router and replicas in (0, logged):
        return Routing(logged, GIVEN, named) if logged > 1 else Routing()
    replicas = replicas or logged
    if replicas < 2 and router:
        raise UsageError(f"--router {router} sends requests to one of several engines", "add --replicas N")
    if not replicas:
        return Routing()
    if replicas > MOST_REPLICAS:
        raise UsageError(f"--replicas {replicas} is more than {MOST_REPLICAS}", "give a number from 1 to 64")
    if replicas == 1:
        return Routing()
    return Routing(replicas, router or USUAL)


def with_other_routings(
    simulators: Simulators, run: Run, setup: Setup, watch: Callable[[Report], None] | None = None
) -> Run:
    """Replay the load with each router, and in one cache of all engines' size; return the run with what they hit."""
    others = other_routings(setup, run)
    outcomes = simulators.outcomes([other for _, other in others], watch)
    replayed = [_other(name, outcome) for (name, _), outcome in zip(others, outcomes, strict=True)]
    fleet = run.header.extra.fleet or FleetInfo()
    return run.with_extra(fleet=msgspec.structs.replace(fleet, others=replayed))


def other_routings(setup: Setup, run: Run) -> list[tuple[Router, Setup]]:
    """Return the set-ups with each other router, and of one engine as large and as fast as all together."""
    routers: list[tuple[Router, Setup]] = [
        (router, setup.replayed(router=router, routed=[]))
        for router in ROUTERS
        if router != setup.simulated.router
    ]
    return [*routers, ("", one_cache(setup, run))]


def one_cache(setup: Setup, run: Run) -> Setup:
    engine, count = run.header.engine, setup.simulated.replicas
    sizes = {
        "num_gpu_blocks_override": engine.num_blocks,
        "max_num_seqs": engine.settings.get("max_num_seqs"),
        "max_num_batched_tokens": engine.settings.get("max_num_batched_tokens"),
    }
    larger = setup.with_flags(**{name: count * int(size) for name, size in sizes.items() if size})
    cost = setup.simulated.cost
    times = {name: getattr(cost, name) / count for name in STEP_TIMES}
    return larger.replayed(replicas=1, router="", routed=[], cost=msgspec.structs.replace(cost, **times))


def _other(router: str, outcome: Run | KvtuneError) -> OtherRouting:
    if isinstance(outcome, KvtuneError):
        return OtherRouting(router=router, error=outcome.message)
    hits = hits_of(outcome.table("requests"))
    return OtherRouting(hits.query_tokens, hits.hit_tokens, router=router)
