"""Step spans on a scheduler of plain objects: what is recorded, and that results and failures pass through."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.probe.ring import STEP, Ring, read_ring
from kvtune.probe.steps import StepProbe


class Scheduler:
    def __init__(self) -> None:
        self.running = [1, 2, 3]
        self.waiting = [4]
        pool = SimpleNamespace(get_num_free_blocks=lambda: 77)
        self.kv_cache_manager = SimpleNamespace(block_pool=pool)

    def schedule(self, throttle: bool = False) -> Any:
        return SimpleNamespace(
            total_num_scheduled_tokens=130,
            num_scheduled_tokens={"a": 1, "b": 1, "c": 128},
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=["a", "b"], num_computed_tokens=[500, 700], num_output_tokens=[3, 9]
            ),
            scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=64)],
        )

    def update_from_output(self, output: Any, model_output: Any) -> str:
        return f"updated {model_output}"


class Faster(Scheduler):
    def update_from_output(self, output: Any, model_output: Any) -> str:
        return "faster"


class Engine:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.batch_queue = None
        self.result = ""
        self.execute = True

    def step(self) -> bool:
        if self.execute:
            output = self.scheduler.schedule(False)
            self.result = self.scheduler.update_from_output(output, "tokens")
        return self.execute


@pytest.fixture
def probe(tmp_path: Path) -> StepProbe:
    return StepProbe(Ring(tmp_path / "ring", 1 << 16))


def test_a_step_is_one_record(probe: StepProbe, tmp_path: Path) -> None:
    engine = Engine(Scheduler())
    probe.wrap_scheduler(engine.scheduler)
    loop = probe.wrap_loop(Engine.step)
    assert loop(engine) is True
    assert engine.result == "updated tokens"
    (row,) = read_ring(tmp_path / "ring").rows
    kind, queued, requests, *v = row
    assert (kind, queued, requests) == (STEP, 0, 3)
    assert v[1] >= v[2] + v[3] + v[4] > 0  # the step holds its parts
    assert (v[6] & 0xFFFFFFFF, v[6] >> 32) == (130, 128)  # two decodes, the rest is prefill
    assert (v[7] & 0xFFFFFFFF, v[7] >> 32) == (3, 1)
    assert (v[8], v[9]) == (77, 500 + 700 + 64)


def test_a_step_that_ran_nothing_is_not_recorded(probe: StepProbe, tmp_path: Path) -> None:
    engine = Engine(Scheduler())
    engine.execute = False
    probe.wrap_scheduler(engine.scheduler)
    assert probe.wrap_loop(Engine.step)(engine) is False
    assert read_ring(tmp_path / "ring").rows == []


def test_a_class_that_changes_later_is_followed(probe: StepProbe) -> None:
    engine = Engine(Scheduler())
    probe.wrap_scheduler(engine.scheduler)
    engine.scheduler.__class__ = Faster
    probe.wrap_loop(Engine.step)(engine)
    assert engine.result == "faster"


def test_a_probe_that_fails_stops_recording_and_the_engine_goes_on(probe: StepProbe, tmp_path: Path) -> None:
    engine = Engine(Scheduler())
    probe.wrap_scheduler(engine.scheduler)
    engine.scheduler.kv_cache_manager = None  # type: ignore[assignment]
    loop = probe.wrap_loop(Engine.step)
    assert loop(engine) and loop(engine)
    assert "NoneType" in probe.failed
    assert read_ring(tmp_path / "ring").rows == []


def test_an_exception_of_the_engine_is_the_engines(probe: StepProbe) -> None:
    def broken(engine: Any) -> bool:
        raise RuntimeError("the model failed")

    probe.wrap_scheduler(Scheduler())
    with pytest.raises(RuntimeError, match="the model failed"):
        probe.wrap_loop(broken)(Engine(Scheduler()))
    assert probe.failed == ""
