"""Several simulated engines on one virtual clock: one equals a replay, none shares state, routers do what they say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvtune.answers.explain.explanation import as_routed
from kvtune.data.run.engines import ranks
from kvtune.data.run.extras import ROUTERS
from kvtune.data.run.types import Run
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from kvtune.lab.sim.verdicts.observer import verdicts_of
from kvtune.requests.loads.spec import build
from tests.choice import each_value, first_of
from tests.simulator import on

pytestmark = pytest.mark.vllm

FLAGS = ["--block-size", "32", "--max-model-len", "1700", "--max-num-batched-tokens", "512", "--max-num-seqs"]
LOADS = (
    "chat:sessions=8,turns=4,output=60,rate=2.0,think=1.5",
    "zipf:prefixes=12,prefix=500,requests=60,concurrency=8,output=90",
    "rounds:prefixes=4,prefix=400,suffix=32,output=8,rounds=2",
    "mix:prefixes=3,prefix=700,requests=40,cold=700,rate=3.0,concurrency=0,output=50",
)


def settings(blocks: int = 200, model: str = "tiny-llama", **more: Any) -> Setup:
    core = {name: more.pop(name) for name in ("core", "core_settings") if name in more}
    flags = [*FLAGS, "16", "--num-gpu-blocks-override", str(blocks)]
    return Setup(model=model, engine_args=flags, device=Simulated(**more), **core)


def replays(simulators: Simulators, load: str, wanted: list[Setup], seed: int = 1) -> list[Run]:
    done: dict[int, Run] = {}
    for number, outcome in simulators.run(on(build(load, seed=seed), wanted)):
        assert isinstance(outcome, Run), outcome
        done[number] = outcome
    return [done[number] for number in range(len(wanted))]


@pytest.mark.parametrize(
    ("load", "more"),
    each_value(
        LOADS,
        [
            {},
            {"core": "kvtune", "model": "tiny-gemma3", "blocks": 260, "async_scheduling": True},
            {"shortcuts": False, "async_scheduling": True},
            {"end_s": 3.0},
        ],
    ),
)
def test_a_fleet_of_one_is_a_replay(simulators: Simulators, load: str, more: dict[str, Any]) -> None:
    wanted = settings(**more)
    alone, *fleets = replays(
        simulators,
        load,
        [wanted, *(settings(**more, router=router) for router in ("least-busy", "prefix"))],
    )
    for fleet in fleets:
        assert fleet.header.wall_s == alone.header.wall_s
        assert fleet.header.core == alone.header.core and fleet.header.notes == alone.header.notes
        for name, table in alone.tables.items():
            for column, values in table.items():
                np.testing.assert_array_equal(fleet.table(name)[column], values, f"{name}.{column}")


@pytest.mark.full
@pytest.mark.parametrize(("load", "router"), each_value(LOADS, ROUTERS))
def test_every_request_is_served_once_by_one_engine(simulators: Simulators, load: str, router: str) -> None:
    exact, jumped = replays(
        simulators, load, [settings(router=router, replicas=3, shortcuts=on) for on in (False, True)]
    )
    requests, steps = exact.table("requests"), exact.table("steps")
    assert ranks(exact) == [0, 1, 2] and exact.header.engine.engines == 3
    assert (requests["finish"] == "length").all()
    served = set(requests["engine"].tolist())
    assert served <= {0, 1, 2}
    assert (
        len(served) > 1 or router == "prefix"
    )  # all of a load with one system prompt may go where it is cached
    assert (np.diff(steps["t_s"]) >= 0).all()
    computed = requests["prompt_tokens"] - requests["hit_tokens"] + requests["output_tokens"] - 1
    for rank in ranks(exact):
        mine = requests["engine"] == rank
        assert steps["scheduled_tokens"][steps["process"] == rank].sum() >= computed[mine].sum()
    for column in ("engine", "hit_tokens", "sent_s", "finished_s"):
        np.testing.assert_array_equal(requests[column], jumped.table("requests")[column])


BY_AGE = {"core": "kvtune", "core_settings": {"policy": "two_class", "reuse_bonus_s": 2.0}}
"""Evicts by the age of blocks on the core's clock."""


@pytest.mark.full
@pytest.mark.parametrize("more", first_of([{**BY_AGE, "model": "tiny-gemma3", "blocks": 260}, BY_AGE, {}]))
def test_a_replica_does_what_an_engine_with_its_requests_does(
    simulators: Simulators, more: dict[str, Any]
) -> None:
    """The engines share nothing: each hits as much as one alone that gets the same requests at the same times."""
    load = "mix:prefixes=9,prefix=700,requests=90,cold=700,rate=5.0,concurrency=0,output=50"
    [fleet] = replays(simulators, load, [settings(router="round-robin", replicas=2, **more)])
    served = [np.flatnonzero(fleet.table("requests")["engine"] == rank).tolist() for rank in (0, 1)]
    alone = replays(simulators, load, [settings(requests=mine, **more) for mine in served])
    counters = [run.header.core.counters for run in alone]
    summed = {name: sum(one[name] for one in counters) for name in counters[0]}
    assert fleet.header.core.counters == summed
    assert fleet.header.core.parts == alone[0].header.core.parts
    for run, mine in zip(alone, served, strict=True):
        for column in ("hit_tokens", "sent_s", "first_token_s", "finished_s"):
            one, other = run.table("requests")[column], fleet.table("requests")[column]
            np.testing.assert_array_equal(one[mine], other[mine])


def test_sessions_stay_where_their_prefix_is(simulators: Simulators) -> None:
    turning, staying = replays(
        simulators, LOADS[0], [settings(router=router, replicas=4) for router in ("round-robin", "session")]
    )
    requests = staying.table("requests")
    sessions: dict[str, set[int]] = {}
    for name, engine in zip(requests["id"].tolist(), requests["engine"].tolist(), strict=True):
        sessions.setdefault(name.rpartition("t")[0], set()).add(engine)
    assert all(len(engines) == 1 for engines in sessions.values()), sessions
    assert requests["hit_tokens"].sum() > turning.table("requests")["hit_tokens"].sum()


def test_a_given_routing_is_kept(simulators: Simulators) -> None:
    count = len(build(LOADS[0], seed=1).requests)
    routed = [number * 7 % 3 for number in range(count)]
    [run] = replays(simulators, LOADS[0], [settings(router="given", replicas=3, routed=routed)])
    assert run.table("requests")["engine"].tolist() == routed


@pytest.mark.full
def test_each_prompt_of_a_fleet_is_explained_by_its_engine(simulators: Simulators) -> None:
    """A closed loop whose turns go from engine to engine is replayed as it was routed: each request hits the same."""
    load = "chat:sessions=6,turns=3,output=40,concurrency=4"
    [run] = replays(simulators, load, [settings(router="round-robin", replicas=2)])
    [again] = replays(simulators, load, [as_routed(run, settings(verdicts=True))])
    requests = again.table("requests")
    for column in ("engine", "hit_tokens", "finished_s"):
        np.testing.assert_array_equal(requests[column], run.table("requests")[column])
    told = verdicts_of(again)
    assert [one.boundaries.hit for one in told if one is not None] == requests["hit_tokens"].tolist()
