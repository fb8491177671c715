"""Records of an engine with a batch queue: which batch they are of, and what it waited for."""

from __future__ import annotations

import gc
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.plugin.probe.records import Collection, Step
from kvtune.plugin.probe.ring import Ring, read_ring
from kvtune.plugin.probe.steps import StepProbe
from tests.plugin.probe.fake_scheduler import Engine, Scheduler


@pytest.fixture
def probe(tmp_path: Path) -> StepProbe:
    return StepProbe(Ring(tmp_path / "ring", 1 << 16))


class Clock:
    """Nanoseconds that pass when the device is waited for, and one with each look at the clock."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1
        return self.now_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("kvtune.plugin.probe.steps.monotonic_ns", made)
    return made


class Device:
    """An executor whose batches take so long, one after another; it is called as EngineCore does."""

    def __init__(self, clock: Clock, *batches_ns: int) -> None:
        self._clock, self._left, self._free_ns = clock, list(batches_ns), 0

    def execute_model(self, output: Any, non_block: bool = False) -> Any:
        return SimpleNamespace(done=lambda: True, result=lambda: None)

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        self._free_ns = ready_ns = max(self._clock.now_ns, self._free_ns) + self._left.pop(0)

        def result() -> str:
            self._clock.now_ns = max(self._clock.now_ns, ready_ns)
            return "tokens"

        return SimpleNamespace(done=lambda: False, result=result)


class Ahead(Scheduler):
    """Batches of these prompts, each the only request of its batch; afterwards there is nothing to schedule."""

    def __init__(self, *prompts: int) -> None:
        super().__init__()
        self.prompts = list(prompts)

    def schedule(self, throttle: bool = False) -> Any:
        tokens = self.prompts.pop(0) if self.prompts else 0
        return SimpleNamespace(
            total_num_scheduled_tokens=tokens,
            num_scheduled_tokens={"a": tokens} if tokens else {},
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], num_computed_tokens=[], num_output_tokens=[], resumed_req_ids=set()
            ),
            finished_req_ids=set(),
            preempted_req_ids=None,
            scheduled_new_reqs=[SimpleNamespace(num_computed_tokens=0)] if tokens else [],
        )


class QueuedEngine:
    """EngineCore's step with a batch queue of two (`step_with_batch_queue`)."""

    def __init__(self, scheduler: Ahead, device: Device) -> None:
        self.scheduler, self.model_executor = scheduler, device
        self.unfinished = len(scheduler.prompts)
        self.batch_queue: deque[tuple[Any, Any]] = deque(maxlen=2)

    def step(self) -> bool:
        executed = False
        if self.unfinished:
            output = self.scheduler.schedule(False)
            future = self.model_executor.execute_model(output, non_block=True)
            executed = output.total_num_scheduled_tokens > 0
            if executed:
                future = self.model_executor.sample_tokens(None, non_block=True)
            self.batch_queue.appendleft((future, output))
            if len(self.batch_queue) < 2:
                return executed
        future, output = self.batch_queue.pop()
        self.unfinished -= output.total_num_scheduled_tokens > 0
        self.scheduler.update_from_output(output, future.result())
        return executed


def queued(probe: StepProbe, engine: QueuedEngine) -> None:
    probe.wrap_scheduler(engine.scheduler)  # type: ignore[arg-type]
    loop = probe.wrap_loop(QueuedEngine.step)  # type: ignore[arg-type]
    turns = 0
    while engine.unfinished or engine.batch_queue:
        loop(engine)  # type: ignore[arg-type]
        turns += 1
        assert turns < 20


def test_with_a_batch_queue_the_record_is_of_the_batch_whose_tokens_came(
    probe: StepProbe, tmp_path: Path, clock: Clock
) -> None:
    queued(probe, QueuedEngine(Ahead(100, 200, 300), Device(clock, 20_000, 80_000, 40_000)))
    rows = read_ring(tmp_path / "ring").of(Step)
    assert probe.failed == "" and "wait" not in probe.disabled
    assert [row.prefill_tokens for row in rows] == [100, 200, 300], "also of batches that only drain"
    assert all(row.queued and row.step_ns >= row.wait_ns > 0 for row in rows)
    own_ns = [round(row.device_ns, -3) for row in rows]
    assert own_ns == [20_000, 80_000, 40_000], "the batch's own time, not that of the batch before"


def test_waiting_is_the_time_inside_the_results_future_without_collections(
    probe: StepProbe, tmp_path: Path
) -> None:
    class Collecting(Device):
        def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
            future = super().sample_tokens(grammar)
            inner = future.result

            def result() -> str:
                for _ in range(3):
                    gc.collect()
                tokens: str = inner()
                return tokens

            future.result = result
            return future

    collector = probe._collector
    collector.install()
    try:
        queued(probe, QueuedEngine(Ahead(5), Collecting(Clock(), 0)))
    finally:
        collector.remove()
    (row,) = read_ring(tmp_path / "ring").of(Step)
    end_ns = row.start_ns + row.step_ns
    inside = [c for c in read_ring(tmp_path / "ring").of(Collection) if row.start_ns <= c.start_ns < end_ns]
    assert len(inside) >= 3
    pauses_ns = sum(each.pause_ns for each in inside)
    assert 0 <= row.wait_ns <= row.step_ns - pauses_ns


def test_time_without_a_batch_belongs_to_no_record(probe: StepProbe, tmp_path: Path, clock: Clock) -> None:
    scheduler = Ahead(5)
    engine = QueuedEngine(scheduler, Device(clock, 100, 100))
    queued(probe, engine)
    clock.now_ns += 50_000
    resumed = clock.now_ns
    scheduler.prompts, engine.unfinished = [6], 1
    loop = probe.wrap_loop(QueuedEngine.step)  # type: ignore[arg-type]
    loop(engine)  # type: ignore[arg-type]
    loop(engine)  # type: ignore[arg-type]
    first, second = read_ring(tmp_path / "ring").of(Step)
    assert first.start_ns + first.step_ns < resumed <= second.start_ns


def test_results_that_cannot_be_watched_cost_no_step(probe: StepProbe, tmp_path: Path) -> None:
    engine = Engine(Scheduler())
    engine.model_executor = object()  # type: ignore[assignment]
    probe.wrap_scheduler(engine.scheduler)  # type: ignore[arg-type]
    probe.wrap_loop(Engine.step)(engine)  # type: ignore[arg-type]
    (row,) = read_ring(tmp_path / "ring").of(Step)
    assert "execute_model" in probe.disabled["wait"] and probe.failed == "" and row.wait_ns == -1
