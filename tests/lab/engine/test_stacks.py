"""Which processes are sampled: each EngineCore and each worker, by its title."""

from __future__ import annotations

from kvtune.lab.engine.stacks import sampled


def test_one_of_each_has_the_roles_name() -> None:
    titles = {7: "python -m kvtune.lab.engine.host", 9: "VLLM::EngineCore", 12: "VLLM::Worker"}
    assert sampled(titles) == {"engine_core": 9, "worker": 12}


def test_an_engine_that_is_its_own_worker_is_sampled_alone() -> None:
    assert sampled({9: "VLLM::EngineCore", 10: "resource_tracker"}) == {"engine_core": 9}


def test_several_are_numbered() -> None:
    titles = {21: "VLLM::Worker_TP1", 9: "VLLM::EngineCore", 20: "VLLM::Worker_TP0"}
    assert sampled(titles) == {"engine_core": 9, "worker_0": 20, "worker_1": 21}
    assert set(sampled({1: "VLLM::EngineCore_DP0", 2: "VLLM::EngineCore_DP1"})) == {
        "engine_core_0",
        "engine_core_1",
    }
