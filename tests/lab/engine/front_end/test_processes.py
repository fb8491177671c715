"""What each process of a run is: with a probe it says so itself, without one its title does."""

from __future__ import annotations

import pytest

from kvtune.lab.engine.launch import HostOutcome
from kvtune.lab.engine.process import ProcessSampler, Sample
from kvtune.lab.engine.record import SERVER, processes_of, server_note
from kvtune.plugin.probe.status import ProcessFacts

HOST = "python -m kvtune.lab.engine.host work 5"
SERVE = f"python -m {SERVER} model --port 1"


def roles(
    titles: dict[int, str], api_servers: int, reporting: dict[int, str] | None = None
) -> dict[int, str]:
    samples = [Sample(pid, 5, 1, 0, 0.0, 1) for pid in titles]
    outcome = HostOutcome("", 0, start_ns=1, end_ns=9, sampler=ProcessSampler(1, names=titles))
    statuses: list[ProcessFacts] = [{"pid": pid, "role": role} for pid, role in (reporting or {}).items()]
    return {p.pid: p.role for p in processes_of(statuses, samples, outcome, api_servers)}


def test_without_a_server_the_host_is_the_front_end() -> None:
    assert roles({1: HOST, 2: "VLLM::EngineCore", 3: "VLLM::Worker"}, 0) == {
        1: "front_end",
        2: "engine_core",
        3: "worker",
    }


@pytest.mark.parametrize("serve", [SERVE, "VLLM::APIServer"])
def test_with_one_api_server_the_process_that_serves_is_the_front_end(serve: str) -> None:
    assert roles({1: HOST, 2: serve, 3: "VLLM::EngineCore"}, 1) == {
        1: "client",
        2: "front_end",
        3: "engine_core",
    }


def test_of_several_api_servers_each_is_a_front_end_and_their_parent_is_none() -> None:
    titles = {1: HOST, 2: SERVE, 3: "VLLM::APIServer_0", 4: "VLLM::APIServer_1", 5: "VLLM::EngineCore"}
    assert roles(titles, 2) == {1: "client", 2: "helper", 3: "front_end", 4: "front_end", 5: "engine_core"}
    assert roles(titles, 2, {3: "front_end", 5: "engine_core"})[3] == "front_end"


def test_a_run_says_what_a_client_cannot_see() -> None:
    assert server_note(0) == []
    (one,), (two,) = server_note(1), server_note(2)
    assert one.startswith("one API server of `vllm serve`") and two.startswith("2 API servers")
    assert "preemptions by request" in one
