"""Collector, host cost, memory and process keys on hand-made tables."""

from __future__ import annotations

import pytest

from kvtune.data.run.types import Run
from kvtune.reading.analysis.gc import Collector, collectors
from kvtune.reading.analysis.host.cost import HostCost, host_cost
from kvtune.reading.analysis.memory import memory
from kvtune.reading.analysis.processes import process_keys
from tests.reading.analysis.made import header_of, table

NAN = float("nan")


def test_shared_roles_are_numbered() -> None:
    assert process_keys(Run(header_of())) == ["front_end", "engine_core", "worker_0", "worker_1", "helper"]
    unknown = Run(header_of(processes=[]), {"gc": table("gc", process=[1], generation=[0])})
    assert process_keys(unknown) == ["process_0", "process_1"]


def test_collections_pauses_and_share_of_step() -> None:
    run = Run(
        header_of(),
        {
            "gc": table(
                "gc",
                process=[1, 1, 1, 0],
                t_s=[0.1, 0.2, 0.3, 0.1],
                generation=[0, 0, 2, 1],
                pause_us=[100.0, 300.0, 5600.0, 2000.0],
            ),
            "steps": table("steps", process=[1, 1], step_us=[40_000.0, 60_000.0], requests=[1, 1]),
        },
    )
    by_process = collectors(run)
    assert list(by_process) == ["front_end", "engine_core", "worker_0", "worker_1"]
    core = by_process["engine_core"]
    assert core.collections == (2, 0, 1)
    assert core.pause_total_ms == pytest.approx(6.0)
    assert core.pause_max_ms == pytest.approx(5.6)
    assert core.share_of_step == pytest.approx(0.06)
    assert core.frozen == 500
    assert by_process["front_end"].share_of_step == pytest.approx(0.02)
    assert by_process["worker_0"] == Collector(share_of_step=0.0, share_by_generation=(0.0, 0.0, 0.0))


def test_a_share_needs_steps() -> None:
    run = Run(header_of(), {"gc": table("gc", process=[1], generation=[0], pause_us=[100.0])})
    assert collectors(run)["engine_core"].share_of_step is None


def test_a_helper_counts_only_where_it_collected() -> None:
    run = Run(header_of(), {"gc": table("gc", process=[4], generation=[1], pause_us=[100.0])})
    assert collectors(run)["helper"].collections == (0, 1, 0)


def test_host_cost_is_per_step_and_per_request_and_step() -> None:
    steps = table(
        "steps",
        schedule_us=[100.0, 300.0, 9000.0, NAN],
        update_us=[50.0, 150.0, 9000.0, 1.0],
        step_us=[1000.0, 3000.0, 1.0, 1.0],
        requests=[10, 30, 0, 5],  # the third scheduled nothing, of the fourth one part is unknown
    )
    cost = host_cost(Run(header_of(), {"steps": steps}))
    assert cost.steps == 2
    assert cost.schedule_us == pytest.approx(200)
    assert cost.update_us == pytest.approx(100)
    assert cost.per_request_step_us == pytest.approx(15)
    assert cost.step_ms.mean == pytest.approx(2)
    assert cost.objects is None
    assert host_cost(Run(header_of())) == HostCost()


def test_net_allocations_are_means_over_steps_that_scheduled() -> None:
    steps = table(
        "steps",
        schedule_us=[1.0] * 3,
        update_us=[1.0] * 3,
        requests=[10, 30, 0],
        schedule_objects=[100, 200, 7777],
        execute_objects=[-10, 30, 7777],
    )
    cost = host_cost(Run(header_of(), {"steps": steps}))
    assert cost.objects == {"schedule": 150, "execute": 10, "update": 0, "other": 0}


def test_memory_peak_and_slope_of_the_second_half() -> None:
    t = [float(i) for i in range(11)]
    growing = [1000 * i for i in range(6)] + [
        5000 + 10 * (i - 5) for i in range(6, 11)
    ]  # warm-up, then 10 B/s
    samples = table("memory", process=[1] * 11 + [0], t_s=[*t, 0.0], rss_bytes=[*growing, 77])
    by_process = memory(Run(header_of(), {"memory": samples}))
    assert list(by_process) == ["front_end", "engine_core"]
    assert by_process["engine_core"].rss_peak_bytes == 5050
    assert by_process["engine_core"].rss_last_bytes == 5050
    assert by_process["engine_core"].slope_bytes_s == pytest.approx(10)
    assert by_process["front_end"].slope_bytes_s is None
