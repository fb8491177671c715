"""What each of several engines did, beside other routings: figures computed by hand, and their words."""

from __future__ import annotations

import pytest

from kvtune.data.run.extras import FleetInfo, OtherRouting
from kvtune.data.run.types import ProcessInfo, Run
from kvtune.reading.analysis.fleet import ONE_CACHE, fleet
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from kvtune.reading.report.sections.fleet import section, tiles
from kvtune.requests.types import Span
from tests.reading.analysis.made import served, table, workload_of

OTHERS = [
    OtherRouting(router="session", hit_tokens=250, query_tokens=400),
    OtherRouting(router="prefix", error="too small"),
    OtherRouting(router="", hit_tokens=300, query_tokens=400),
]


def shared(router: str = "given", others: list[OtherRouting] | None = None) -> Run:
    """Four requests of 100 tokens on two engines; three of them on the first."""
    processes = [ProcessInfo(pid=1 + n, role="engine_core", name=f"EngineCore_DP{n}") for n in (0, 1)]
    steps = table("steps", process=[0, 0, 1], t_s=[0.0, 0.5, 0.0], step_us=[3e5, 2e5, 4e5])
    run = served(
        workload_of([[Span(1, 0, 100)]] * 4),
        [0, 50, 90, 20],
        sent=[0.0] * 4,
        processes=processes,
        wall_s=1.0,
        tables={"steps": steps},
    )
    run.table("requests")["engine"][:] = [0, 0, 0, 1]
    run.table("requests")["preemptions"][:] = [0, 2, 0, 1]
    return run.with_extra(fleet=FleetInfo(replicas=2, router=router, others=others or []))


def test_each_engine_has_its_requests_hits_and_time() -> None:
    found = fleet(shared("session"))
    assert found is not None and found.router == "session"
    first, second = found.replicas
    assert (first.requests, first.query_tokens, first.hit_tokens, first.preemptions) == (3, 300, 140, 2)
    assert (second.requests, second.query_tokens, second.hit_tokens) == (1, 100, 20)
    assert first.rate == pytest.approx(140 / 300)
    assert (first.busy_share, second.busy_share) == (pytest.approx(0.5), pytest.approx(0.4))
    assert found.balance == pytest.approx(160 / 120), "the first computed 160 tokens, the mean is 120"


def test_the_regret_names_the_best_router_and_one_cache() -> None:
    found = fleet(shared(others=OTHERS))
    assert found is not None and found.best is not None and found.one_cache is not None
    assert (found.best.router, found.best.hit_tokens) == ("session", 250)
    assert found.one_cache.hit_tokens == 300
    [_, routing] = tiles(found)
    assert routing.value == "40.0 %"
    assert routing.more == "as routed; session 62.5 %; one cache for all 75.0 %"
    worse = fleet(shared(others=[OtherRouting(router="session", hit_tokens=100, query_tokens=400)]))
    assert worse is not None and worse.best is None
    assert tiles(worse)[1].more == "as routed, no other router here hits more"


def test_page_terminal_and_json_have_them() -> None:
    analysis = RunAnalysis(shared(others=OTHERS))
    made = section(analysis)
    assert made is not None and len(made.tables) == 2
    assert [cell.text for row in made.tables[1].rows for cell in row[:2]] == [
        *("as routed", "160", "session", "250", "prefix", "too small", ONE_CACHE, "300")
    ]
    plain = summary(analysis)["fleet"]
    assert plain["router"] == "as routed" and len(plain["replicas"]) == 2
    assert sum(one["hit_tokens"] for one in plain["replicas"]) == 160
    assert plain["others"][0] == {"router": "session", "hit_tokens": 250, "query_tokens": 400, "error": ""}


def test_a_run_of_one_engine_has_none() -> None:
    one = RunAnalysis(served(workload_of([[Span(1, 0, 100)]]), [0]))
    assert one.fleet is None and section(one) is None and summary(one)["fleet"] is None


def test_a_real_run_of_several_engines_has_them_without_a_router() -> None:
    run = shared()
    found = fleet(run.with_extra(fleet=None))
    assert found is not None and found.router == "" and not found.others and len(found.replicas) == 2
