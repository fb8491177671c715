"""Two real engines behind vLLM's own balancer (`--data-parallel-size 2`) beside their replay, on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtune.answers.explain.explanation import as_routed
from kvtune.data.run.engines import ranks, served_by
from kvtune.data.run.types import hits_of
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.spec import build
from tests.lab.engine.real import profiled
from tests.simulator import simulate

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

POOL = ("--num-gpu-blocks-override", "40", "--block-size", "32", "--max-model-len", "1024")
ONE_AT_A_TIME = (
    "rounds:prefixes=3,prefix=300,suffix=32,output=8,rounds=4,concurrency=1",
    "chat:sessions=6,turns=3,first=200,user=40,output=16,concurrency=1",
)
SOME_AT_ONCE = "zipf:prefixes=8,prefix=300,suffix=32,requests=40,output=8,rate=6,concurrency=0"


@pytest.mark.parametrize("load", [*ONE_AT_A_TIME, SOME_AT_ONCE])
def test_each_engine_hits_what_its_replica_hits(tmp_path: Path, load: str) -> None:
    """As routed: each request's hits. By vLLM's balancer, one request at a time: each request's engine, too."""
    run = profiled(tmp_path, "tiny-llama", "-w", load, engine=("--data-parallel-size", "2", *POOL)).run
    assert ranks(run) == [0, 1] and all(served_by(run, rank).any() for rank in (0, 1))
    requests, work = run.table("requests"), build(load, seed=run.header.workload.seed)
    setup = Setup.of_run(run, trusted=True)
    routed = simulate(work, as_routed(run, setup))
    assert hits_of(run.table("requests")).hit_tokens > 0
    for rank in (0, 1):
        mine = served_by(run, rank)
        np.testing.assert_array_equal(
            routed.table("requests")["hit_tokens"][mine], requests["hit_tokens"][mine], f"engine {rank}"
        )
    if load in ONE_AT_A_TIME:
        chosen = simulate(work, setup.replayed(replicas=2, router="least-busy"))
        engine = chosen.table("requests")["engine"]
        # Requests of the warm-up came before: the first one may go to either engine.
        assert engine.tolist() in (requests["engine"].tolist(), (1 - requests["engine"]).tolist())
        np.testing.assert_array_equal(chosen.table("requests")["hit_tokens"], requests["hit_tokens"])
