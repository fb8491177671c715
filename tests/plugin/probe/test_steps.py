"""Step times on a fake scheduler: the records, and that results and exceptions pass through."""

from __future__ import annotations

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvtune.plugin.probe.gc import CollectorProbe
from kvtune.plugin.probe.records import PoolChange, Step
from kvtune.plugin.probe.ring import Ring, read_ring
from kvtune.plugin.probe.steps import StepProbe
from tests.plugin.probe.fake_scheduler import Engine, Scheduler


class Faster(Scheduler):
    def update_from_output(self, output: Any, model_output: Any) -> str:
        return "faster"


@pytest.fixture
def probe(tmp_path: Path) -> StepProbe:
    return StepProbe(Ring(tmp_path / "ring", 1 << 16))


def test_a_step_is_one_record(probe: StepProbe, tmp_path: Path) -> None:
    engine = Engine(Scheduler())
    probe.wrap_scheduler(engine.scheduler)
    loop = probe.wrap_loop(Engine.step)
    assert loop(engine) is True
    assert engine.result == "updated tokens"
    (row,) = read_ring(tmp_path / "ring").of(Step)
    assert (row.queued, row.requests) == (False, 3)
    assert row.step_ns >= row.schedule_ns + row.execute_ns + row.update_ns > 0, "a step contains its parts"
    assert (row.scheduled_tokens, row.prefill_tokens) == (130, 128)  # two decodes, the rest is prefill
    assert (row.running, row.waiting, row.free_blocks) == (3, 1, 77)
    assert (row.prefill_context_tokens, row.context_tokens) == (64, 500 + 700 + 64)


def test_a_step_that_evicts_has_a_record_of_it(probe: StepProbe, tmp_path: Path) -> None:
    class Queues:
        names, taken = ("blank", "probation", "protected"), [0, 0, 0, 0]

    class Evicting(Scheduler):
        def schedule(self, throttle: bool = False) -> Any:
            Queues.taken[2] += 3
            Queues.taken[3] += 1
            return super().schedule(throttle)

    engine = Engine(Evicting())
    engine.scheduler.kv_cache_manager.block_pool.free_block_queue = Queues()
    probe.wrap_scheduler(engine.scheduler)
    probe.wrap_loop(Engine.step)(engine)
    step, pool = read_ring(tmp_path / "ring").rows
    assert pool == PoolChange(77, step.start_ns, (3, 1, 0, 0, 0, 0))


def test_a_pool_that_cannot_be_watched_costs_no_step(probe: StepProbe, tmp_path: Path) -> None:
    engine = Engine(Scheduler())
    probe.wrap_scheduler(engine.scheduler)
    probe.wrap_loop(Engine.step)(engine)
    assert "free_block_queue" in probe.disabled["pool"] and probe.failed == ""
    assert [type(row) for row in read_ring(tmp_path / "ring").rows] == [Step]


class Decoding(Scheduler):
    """Steps that only decode, in the form of vLLM's outputs; `ids` may change between them."""

    def __init__(self, computed: int = 500) -> None:
        super().__init__()
        self.ids, self.computed, self.finished = ["a", "b", "c"], computed, set[str]()

    def schedule(self, throttle: bool = False) -> Any:
        self.running = list(self.ids)
        self.computed += 1
        return SimpleNamespace(
            total_num_scheduled_tokens=len(self.ids),
            num_scheduled_tokens=dict.fromkeys(self.ids, 1),
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(self.ids),
                num_computed_tokens=[self.computed] * len(self.ids),
                num_output_tokens=[5] * len(self.ids),
                resumed_req_ids=set(),
            ),
            scheduled_new_reqs=[],
            finished_req_ids=self.finished,
            preempted_req_ids=None,
        )


def test_context_is_followed_through_steady_steps_and_changes(probe: StepProbe, tmp_path: Path) -> None:
    scheduler = Decoding()
    engine = Engine(scheduler)
    probe.wrap_scheduler(scheduler)
    loop = probe.wrap_loop(Engine.step)
    for ids in ("abc", "abc", "abc", "ab", "ab", "xb", "xb"):
        scheduler.ids = list(ids)
        loop(engine)
    rows = read_ring(tmp_path / "ring").of(Step)
    assert probe.failed == ""
    assert [row.context_tokens for row in rows] == [
        (501 + i) * n for i, n in enumerate((3, 3, 3, 2, 2, 2, 2))
    ]
    assert all(row.prefill_tokens == 0 for row in rows)


def test_a_preempted_request_prefills_again(probe: StepProbe, tmp_path: Path) -> None:
    """It already has output, like a decode, but the tokens that it recomputes are prefill."""
    steps = iter(
        [
            # ids, tokens, computed, preempted
            ("ab", (1, 1), (500, 700), {"c"}),
            ("abc", (1, 1, 128), (501, 701, 0), None),
            ("abc", (1, 1, 72), (502, 702, 128), None),
            ("abc", (1, 1, 1), (503, 703, 200), None),
            ("abc", (1, 1, 1), (504, 704, 201), None),
        ]
    )

    class Preempting(Scheduler):
        def schedule(self, throttle: bool = False) -> Any:
            ids, tokens, computed, preempted = next(steps)
            self.running = list(ids)
            return SimpleNamespace(
                total_num_scheduled_tokens=sum(tokens),
                num_scheduled_tokens=dict(zip(ids, tokens, strict=True)),
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=list(ids),
                    num_computed_tokens=list(computed),
                    num_output_tokens=[5] * len(ids),
                    resumed_req_ids=set(),
                ),
                scheduled_new_reqs=[],
                scheduled_spec_decode_tokens={},
                finished_req_ids=set(),
                preempted_req_ids=preempted,
            )

    scheduler = Preempting()
    probe.wrap_scheduler(scheduler)
    loop = probe.wrap_loop(Engine.step)
    for _ in range(5):
        loop(Engine(scheduler))
    assert probe.failed == ""
    rows = read_ring(tmp_path / "ring").of(Step)
    assert [row.preempted for row in rows] == [1, 0, 0, 0, 0]
    assert [row.prefill_tokens for row in rows] == [0, 128, 72, 0, 0]
    assert [row.prefill_context_tokens for row in rows[:3]] == [0, 0, 128]
    assert [row.context_tokens for row in rows] == [1200, 1202, 1332, 1406, 1409]


def test_net_allocations_are_counted_by_phase_also_across_a_collection(tmp_path: Path) -> None:
    class Keeping(Decoding):
        kept: ClassVar[list[Any]] = []

        def schedule(self, throttle: bool = False) -> Any:
            self.kept += [[] for _ in range(300)]
            gc.collect(0)
            self.kept += [[] for _ in range(200)]
            return super().schedule(throttle)

        def update_from_output(self, output: Any, model_output: Any) -> str:
            self.kept += [[] for _ in range(100)]
            return ""

    collector = CollectorProbe(Ring(tmp_path / "collections", 1 << 16))
    probe = StepProbe(Ring(tmp_path / "ring", 1 << 16), collector=collector)
    engine = Engine(Keeping())
    probe.wrap_scheduler(engine.scheduler)
    loop = probe.wrap_loop(Engine.step)
    collector.install()
    try:
        gc.collect()
        loop(engine)
    finally:
        collector.remove()
        Keeping.kept.clear()
    (row,) = read_ring(tmp_path / "ring").of(Step)
    assert 500 <= row.schedule_objects < 560 and 100 <= row.update_objects < 120
    assert abs(row.execute_objects) < 20 and abs(row.other_objects) < 20


def test_a_step_that_ran_nothing_is_not_recorded(probe: StepProbe, tmp_path: Path) -> None:
    engine = Engine(Scheduler())
    engine.execute = False
    probe.wrap_scheduler(engine.scheduler)
    assert probe.wrap_loop(Engine.step)(engine) is False
    assert read_ring(tmp_path / "ring").rows == []


def test_a_scheduler_whose_class_changes_later_is_still_timed(probe: StepProbe) -> None:
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


def test_an_exception_of_the_engine_passes_through(probe: StepProbe) -> None:
    def broken(engine: Any) -> bool:
        raise RuntimeError("the model failed")

    probe.wrap_scheduler(Scheduler())
    with pytest.raises(RuntimeError, match="the model failed"):
        probe.wrap_loop(broken)(Engine(Scheduler()))
    assert probe.failed == ""


def test_a_scheduler_whose_preemptions_cannot_be_followed_goes_on(probe: StepProbe, tmp_path: Path) -> None:
    class Preempting(Scheduler):
        """Preempts a request in each step; its cache cannot be asked."""

        def __init__(self) -> None:
            super().__init__()
            self.requests: dict[str, Any] = {}
            self.left: list[str] = []
            self.kv_cache_manager.enable_caching = True
            self.kv_cache_manager.coordinator = SimpleNamespace()

        def _preempt_request(self, request: Any, timestamp: float) -> None:
            self.left.append(request.request_id)

        def schedule(self, throttle: bool = False) -> Any:
            request = SimpleNamespace(request_id="7-ab", num_computed_tokens=9, num_tokens=9, block_hashes=[])
            self._preempt_request(request, 0.0)
            return super().schedule(throttle)

    engine = Engine(Preempting())
    probe.preempted = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvtune.plugin.probe.preempted.hit_unit", lambda scheduler: 1)
        probe.wrap_scheduler(engine.scheduler)
    assert probe.preempted is not None
    loop = probe.wrap_loop(Engine.step)
    assert loop(engine) and loop(engine)
    assert engine.scheduler.left == ["7-ab", "7-ab"] and probe.failed == ""
    assert "find_longest_cache_hit" in probe.disabled["preempted"] and probe.preempted is None
    assert [type(row) for row in read_ring(tmp_path / "ring").rows] == [Step, Step]
