"""Errors on the steady path, and changes between its steps: the engine goes on as stock would."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtune.data.knobs import CoreSettings
from tests.plugin.core.steady_rig import (
    ModelRunnerOutput,
    PauseState,
    Shape,
    Twins,
    adopt,
    build,
    request,
    scheduler,
    steady,
)

pytestmark = pytest.mark.vllm

BOTH = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
KINDS = pytest.mark.parametrize("windows", [(), (12, 12)], ids=["full", "hybrid"])


def decoding(shape: Shape, count: int = 8, settings: CoreSettings | None = None) -> Twins:
    """Twins that have taken the steady path for a while."""
    twins = Twins(shape, settings)
    for i in range(count):
        twins.add(name=f"r-{i}", prompt=[i, *range(5 + 3 * i)], output=100)
    for _ in range(12):
        twins.step()
    assert twins.ours.steady_steps > 5
    return twins


def on(twins: Twins, steps: int) -> None:
    for _ in range(steps):
        twins.step()
        twins.compare()


@BOTH
@KINDS
@pytest.mark.parametrize("when", range(3))
def test_an_allocation_on_the_path_that_gets_no_blocks(
    asynchronous: bool, windows: tuple[int, ...], when: int
) -> None:
    twins = decoding(Shape(asynchronous=asynchronous, windows=windows))
    calls = 0
    real = twins.ours.steady_allocate

    def refuses(one: Any) -> Any:
        nonlocal calls
        calls += 1
        return None if calls == when + 1 else real(one)

    twins.ours.steady_allocate = refuses
    before = twins.ours.steady_steps
    on(twins, 30)
    assert twins.ours.steady_off == ""
    assert twins.ours.steady_steps > before


@BOTH
def test_a_pause_and_a_reset_of_the_cache(asynchronous: bool) -> None:
    twins = decoding(Shape(asynchronous=asynchronous))
    pair = (twins.stock, twins.ours)
    for one in pair:
        one.set_pause_state(PauseState.PAUSED_NEW)
    twins.add(name="r-50", prompt=[1, 2, 3], output=50)
    on(twins, 5)
    for one in pair:
        one.set_pause_state(PauseState.UNPAUSED)
    on(twins, 10)
    while twins.queue:
        twins.update()
    for one in pair:
        one.reset_prefix_cache(reset_running_requests=True)
    on(twins, 20)
    before = twins.ours.steady_steps
    on(twins, 10)
    assert twins.ours.steady_steps > before


@BOTH
def test_the_path_counts_steps_by_which_frees_are_deferred_and_waits_for_these(asynchronous: bool) -> None:
    """The flag may be set after the scheduler was built, as vLLM's own tests do."""
    twins = decoding(Shape(asynchronous=asynchronous))
    while twins.queue:
        twins.update()
    for one in (twins.stock, twins.ours):
        one.defer_block_free = True
    deferred, begun = 0, twins.ours.steady_steps
    for step in range(30):
        before = twins.ours.steady_steps
        waits = bool(twins.ours.deferred_frees)
        twins.step()
        twins.compare()
        stock, ours = twins.stock, twins.ours
        assert (stock.sched_step_seq, stock.processed_step_seq) == (
            ours.sched_step_seq,
            ours.processed_step_seq,
        )
        assert [fence for fence, _ in stock.deferred_frees] == [fence for fence, _ in ours.deferred_frees]
        seqs = [[request.last_sched_seq for request in each.running] for each in (stock, ours)]
        assert seqs[0] == seqs[1]
        assert not (waits and twins.ours.steady_steps > before)
        if step % 10 == 5:
            twins.abort(twins.ours.running[0].request_id)  # a step in flight still writes its blocks
            deferred += len(twins.ours.deferred_frees)
    assert bool(deferred) == asynchronous
    assert twins.ours.steady_steps > begun + 20


@BOTH
def test_steps_that_are_throttled_are_stocks(asynchronous: bool) -> None:
    twins = decoding(Shape(asynchronous=asynchronous))
    before = twins.ours.steady_steps
    for one in (twins.stock, twins.ours):
        one.schedule(throttle_prefills=True)
    assert twins.ours.steady_steps == before
    assert twins.ours.steady_cohort is None


@pytest.mark.parametrize(
    "sampling",
    [{"logprobs": 1}, {"prompt_logprobs": 1}, {"structured": True}],
    ids=["logprobs", "prompt_logprobs", "structured"],
)
def test_a_request_that_is_not_a_plain_decode_keeps_all_on_stocks_path(sampling: dict[str, Any]) -> None:
    ours = build(Shape())
    scheduler.adopt(ours, CoreSettings())
    structured = sampling.pop("structured", False)
    one = request("r-1", [1, 2, 3], 40, **sampling)
    if structured:
        one.structured_output_request = object()
    one.num_computed_tokens = one.num_tokens - 1
    assert not steady.is_plain_decode(one, 0)
    one.structured_output_request = None
    one.sampling_params.logprobs = one.sampling_params.prompt_logprobs = None
    assert steady.is_plain_decode(one, 0)


@BOTH
def test_logprobs_in_the_models_output_go_to_stock(asynchronous: bool) -> None:
    twins = decoding(Shape(asynchronous=asynchronous))
    entry = twins.ours._in_flight[0] if asynchronous else None
    for _ in range(3):
        scheduled = twins.ours.schedule()
        cohort, rows = twins.ours.steady_cohort, twins.ours.steady_cohort.rows
        output = twins.model.run(twins.ours, scheduled)
        assert twins.ours._read(cohort, rows, output) is not None
        for field in ("logprobs", "num_nans_in_logits", "kv_connector_output", "sampling_masks"):
            odd = ModelRunnerOutput(**{**vars(output), field: {"r-0": 1}})
            assert twins.ours._read(cohort, rows, odd) is None, field
        twins.ours.update_from_output(
            entry[0] if entry and twins.ours._in_flight[0] is entry else scheduled, output
        )
        entry = None


@BOTH
@KINDS
@pytest.mark.parametrize("policy", ["first", "chat", "pin", "two_class"])
def test_with_the_cores_own_pool(asynchronous: bool, windows: tuple[int, ...], policy: str) -> None:
    """The steady path decides what the core without it decides, whichever pool there is."""
    twins = Twins(Shape(asynchronous=asynchronous, windows=windows, blocks=300))
    settings = CoreSettings(policy=policy, slack=8, reuse_bonus_s=1e6)
    twins.stock, twins.ours = build(twins.shape), build(twins.shape)
    for one in (twins.stock, twins.ours):
        adopt.adopt(one.kv_cache_manager, settings)
    scheduler.adopt(twins.ours, settings)
    assert twins.ours.steady_off == ""
    for step in range(120):
        if step % 15 == 0:
            for i in range(3):
                twins.add(name=f"r-{step * 10 + i}", prompt=[*range(20), step, i], output=20 + 10 * i)
        twins.step()
        twins.compare()
    assert twins.ours.steady_steps > 40


def test_allocations_that_do_nothing_return_one_object() -> None:
    twins = decoding(Shape(), settings=CoreSettings(steady=True))
    manager = twins.ours.kv_cache_manager
    one = twins.ours.running[0]
    assert manager.limits_of(one).slots > 0
    while one.num_computed_tokens % 4 != 1:
        twins.step()
    first = manager.allocate_slots(one, 1, num_lookahead_tokens=0)
    assert first is manager.empty_kv_cache_blocks
    assert first.get_block_ids(allow_none=True) is None


def test_a_synchronous_scheduler_that_is_asked_again_before_its_step_has_ended_schedules_nothing() -> None:
    twins = decoding(Shape(asynchronous=False))
    for one in (twins.stock, twins.ours):
        assert one.schedule().total_num_scheduled_tokens == 8
        assert [one.schedule().total_num_scheduled_tokens for _ in range(3)] == [0, 0, 0]


@BOTH
def test_an_output_connector_that_is_bound_later_ends_the_path(asynchronous: bool) -> None:
    twins = decoding(Shape(asynchronous=asynchronous))
    assert twins.ours.find_steady_cohort() is not None
    twins.ours.aux_output_connector = object()
    assert twins.ours.find_steady_cohort() is None
