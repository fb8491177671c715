"""How a load is shared, what another routing hits, and the search for the fewest replicas. No engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvtune.base.errors import UsageError
from kvtune.data.flags import flag_texts
from kvtune.data.run.extras import GIVEN, ROUTERS
from kvtune.data.run.types import EngineInfo, Run, hits_of
from kvtune.data.tally import Hits
from kvtune.lab.setup.setup import Setup
from kvtune.lab.sim.routing import (
    Routing,
    one_cache,
    other_routings,
    routing,
)
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Span, Workload
from tests.reading.analysis.made import served, workload_of


def log(folder: Path, *replicas: object) -> Workload:
    """A log of one request for each of these replicas; None: the line names none."""
    rows = [
        {"prompt": [i, 2, 3], "answer": [4]} | ({} if name is None else {"replica": name})
        for i, name in enumerate(replicas)
    ]
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build(f"requests:path={path}")


def test_a_log_that_names_replicas_is_shared_as_it_says(tmp_path: Path) -> None:
    assert routing(log(tmp_path, "b", "a", "c", "a")) == Routing(3, GIVEN, [1, 0, 2, 0])
    assert routing(log(tmp_path, 10, 9, "10")) == Routing(2, GIVEN, [1, 0, 1]), "numbers in their order"
    assert routing(log(tmp_path, "a", "a")) == Routing(), "one engine needs no router"
    named = log(tmp_path, "b", "a")
    assert routing(named, 2) == Routing(2, GIVEN, [1, 0])
    assert routing(named, 0, "prefix") == Routing(2, "prefix")
    assert routing(named, 4) == Routing(4, "least-busy")
    assert routing(named, 1) == Routing()


def test_a_load_without_names_is_shared_as_asked() -> None:
    load = build("rounds")
    assert routing(load) == routing(load, 1) == Routing()
    assert routing(load, 3) == Routing(3, "least-busy") and routing(load, 2, "session") == Routing(
        2, "session"
    )
    with pytest.raises(UsageError, match="one of several engines"):
        routing(load, 0, "session")
    with pytest.raises(UsageError, match="one of several engines"):
        routing(load, 1, "session")
    with pytest.raises(UsageError, match="more than 64"):
        routing(load, 65)


def test_a_log_that_names_some_replicas_is_refused_unless_the_user_chooses(tmp_path: Path) -> None:
    some = log(tmp_path, "a", None, "b")
    with pytest.raises(UsageError, match="1 of the log's 3 requests name no replica"):
        routing(some)
    assert routing(some, 2) == Routing(2, "least-busy")


@pytest.mark.parametrize("name", [True, -1, [], "", 1.5, {}])
def test_a_replica_that_is_no_name_is_refused(tmp_path: Path, name: object) -> None:
    with pytest.raises(UsageError, match="line 2 has a `replica` that is neither a name nor a number"):
        log(tmp_path, "a", name)


def test_the_replica_does_not_change_the_work(tmp_path: Path) -> None:
    hashes = {log(tmp_path, *names).hash for names in ((None, None), ("a", "b"), (1, 1))}
    assert len(hashes) == 1


def run_of(hits: Sequence[int], blocks: int = 100) -> Run:
    return served(
        workload_of([[Span(1, 0, 100)]] * len(hits)),
        hits,
        engine=EngineInfo(
            num_blocks=blocks, settings={"max_num_seqs": 16, "max_num_batched_tokens": 512}, engines=3
        ),
    )


def test_the_other_routings_are_each_router_and_one_cache_of_all_engines_size() -> None:
    setup = Setup(model="tiny-opt", engine_args=["--max-num-seqs", "16"]).replayed(
        replicas=3, router=GIVEN, routed=[0, 1]
    )
    others = other_routings(setup, run_of([0, 0]))
    assert [name for name, _ in others] == [*ROUTERS, ""]
    assert all(one.simulated.replicas == 3 and not one.simulated.routed for name, one in others if name)
    whole = one_cache(setup, run_of([0, 0]))
    alone = whole.simulated
    assert (alone.replicas, alone.router, alone.routed) == (1, "", [])
    assert flag_texts(whole.engine_args) == {
        "max-num-seqs": "48",
        "num-gpu-blocks-override": "300",
        "max-num-batched-tokens": "1536",
    }
    for work in ((100, 0, 0, 0.0), (0, 9, 5_000, 0.0)):
        assert alone.cost.seconds(*work) == pytest.approx(setup.simulated.cost.seconds(*work) / 3)


def test_hits_are_those_of_requests_that_were_admitted() -> None:
    assert hits_of(run_of([40, 50, -1]).table("requests")) == Hits(200, 90)
