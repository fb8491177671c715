"""The account of slow tokens: planted stalls get their cause, and the parts always add up to the time that was lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.data.run.types import Run
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.stalls.account import Stalls, stalls
from kvtune.reading.analysis.stalls.times import steps_of
from tests.reading.analysis.stall_runs import (
    BETWEEN_S,
    ENGINE_CORE,
    FRONT_END,
    REQUESTS,
    STEP_S,
    WORKER,
    Toy,
)

STALL_S = 0.5
AT = 50


def account(toy: Toy) -> Stalls:
    return stalls(toy.run())


def only(toy: Toy) -> Stalls:
    """The account of a toy with one stall of all requests, and nothing else that is slow."""
    found = account(toy)
    assert (found.slow, found.stalls, len(found.worst)) == (REQUESTS, 1, 1)
    assert found.worst[0].gap_ms == pytest.approx(1000 * (STALL_S + STEP_S + BETWEEN_S), rel=0.02)
    return found


def begin_of(step: int, toy: Toy) -> float:
    return float(toy.times()[0][step])


def test_a_run_without_a_slow_token_has_an_empty_account() -> None:
    found = account(Toy())
    assert found.gaps == REQUESTS * 99 and found.slow == found.stalls == 0
    assert found.causes == {} and found.worst == ()
    assert found.median_ms == pytest.approx(11.0) and found.limit_ms == pytest.approx(22.0)


def test_a_step_that_takes_longer_than_its_work_is_the_devices() -> None:
    found = only(Toy(in_step={AT: STALL_S}))
    assert list(found.causes) == ["device"]
    assert found.causes["device"].share == pytest.approx(1.0)
    assert found.causes["device"].excess_ms == pytest.approx(REQUESTS * STALL_S * 1000)
    assert found.lost_ms["device"] == pytest.approx(STALL_S * 1000)  # once, however many requests waited
    evidence = found.worst[0].evidence
    assert evidence.step_ms == pytest.approx(510.0) and evidence.fitted_ms == pytest.approx(10.0, rel=0.01)


def test_time_between_two_steps_is_engine_cores() -> None:
    found = only(Toy(before={AT: STALL_S}))
    assert found.worst[0].cause == "engine_wait" and found.causes["engine_wait"].gaps == REQUESTS


def test_a_huge_prefill_in_the_same_step_is_named_with_its_request() -> None:
    found = only(Toy(prefill={AT: 10_000}))
    stall = found.worst[0]
    assert stall.cause == "prefill" and stall.parts_ms["prefill"] == pytest.approx(500.0)
    assert stall.evidence.requests == (f"prompt-{AT}",) and stall.evidence.prompt_tokens == 10_000


def test_a_prefill_that_takes_longer_than_others_of_its_size_is_shared_with_the_device() -> None:
    """Thirty prefills of 100 tokens, 5 ms each; one of them takes half a second more."""
    prompts = {i: 100 + i for i in range(5, 95, 3)}
    found = account(Toy(prefill=prompts, in_step={50: STALL_S}))
    stall = found.worst[0]
    assert stall.cause == "device"
    assert stall.parts_ms["prefill"] == pytest.approx(0.05 * prompts[50], rel=0.1)
    assert stall.parts_ms["device"] == pytest.approx(500.0, rel=0.02)


@pytest.mark.parametrize("process", [ENGINE_CORE, WORKER])
def test_a_collection_is_named_with_process_generation_and_line(process: int) -> None:
    toy = Toy(in_step={AT: STALL_S}, lines=["/lib/a.py:7", "/lib/b.py:12"])
    line = 2 if process == ENGINE_CORE else 0
    toy.gc = [(process, begin_of(AT, toy) + 0.001, STALL_S, STALL_S * 0.97, 2, line)]
    stall = only(toy).worst[0]
    assert stall.cause == "collection" and stall.parts_ms["collection"] == pytest.approx(500.0, rel=0.01)
    assert stall.evidence.process == ("engine_core" if process == ENGINE_CORE else "worker")
    assert (stall.evidence.generation, stall.evidence.pause_ms) == (2, pytest.approx(500.0))
    assert stall.evidence.line == ("/lib/b.py:12" if line else "")


def test_a_collection_in_the_front_end_delays_the_delivery_and_not_the_step() -> None:
    toy = Toy(way={AT: STALL_S})
    toy.gc = [(FRONT_END, float(toy.times()[1][AT]) + 0.0001, STALL_S, STALL_S, 2, 0)]
    found = account(toy)
    assert found.worst[0].cause == "collection" and found.worst[0].evidence.process == "front_end"


def test_a_collection_in_the_front_end_while_the_engine_computes_explains_nothing() -> None:
    toy = Toy(in_step={AT: STALL_S})
    toy.gc = [(FRONT_END, begin_of(AT, toy) + 0.001, STALL_S * 0.9, STALL_S * 0.9, 2, 0)]
    assert only(toy).worst[0].cause == "device"


def test_a_small_collection_that_lost_its_cpu_is_the_machines() -> None:
    toy = Toy(in_step={AT: STALL_S})
    toy.gc = [(ENGINE_CORE, begin_of(AT, toy) + 0.001, STALL_S, 0.0001, 0, 0)]
    stall = only(toy).worst[0]
    assert stall.cause == "off_cpu" and stall.evidence.process == "engine_core"


def test_a_large_collection_on_a_busy_machine_stays_the_collectors() -> None:
    toy = Toy(in_step={AT: STALL_S})
    toy.gc = [(ENGINE_CORE, begin_of(AT, toy) + 0.001, STALL_S, 0.1, 2, 0)]
    assert only(toy).worst[0].cause == "collection"


@pytest.mark.parametrize(("process", "name"), [(ENGINE_CORE, "engine_core"), (WORKER, "worker")])
def test_a_stopped_process_of_the_engine_had_no_cpu(process: int, name: str) -> None:
    toy = Toy(in_step={AT: STALL_S})
    toy.stopped = [(process, begin_of(AT, toy) + at) for at in (0.1, 0.3)]
    stall = only(toy).worst[0]
    assert (stall.cause, stall.evidence.process, stall.evidence.stopped) == ("off_cpu", name, True)


def test_a_stopped_front_end_is_late_with_tokens_that_the_engine_went_on_making() -> None:
    toy = Toy(way={AT: STALL_S})
    toy.stopped = [(FRONT_END, float(toy.times()[1][AT]) + 0.2)]
    found = account(toy)
    assert (found.slow, found.stalls) == (REQUESTS, 1)
    stall = found.worst[0]
    assert (stall.cause, stall.evidence.process, stall.evidence.stopped) == ("off_cpu", "front_end", True)


def test_the_same_stop_at_another_time_explains_nothing() -> None:
    toy = Toy(in_step={AT: STALL_S})
    toy.stopped = [(ENGINE_CORE, begin_of(20, toy)), (FRONT_END, begin_of(AT, toy) + 0.1)]
    assert only(toy).worst[0].cause == "device"


def test_a_wait_for_a_cpu_explains_as_much_as_the_process_waited() -> None:
    toy = Toy(in_step={AT: STALL_S})
    begin = begin_of(AT, toy)
    samples = [(begin - 0.1, 1.0), (begin + 0.7, 1.4)]
    toy.waits = {WORKER: samples, ENGINE_CORE: [(at, 0.0) for at, _ in samples]}
    stall = only(toy).worst[0]
    assert (stall.cause, stall.evidence.process, stall.evidence.stopped) == ("off_cpu", "worker", False)
    assert stall.parts_ms["off_cpu"] == pytest.approx(400.0, rel=0.01)
    assert stall.parts_ms["device"] == pytest.approx(100.0, rel=0.05)


def test_a_thread_that_always_spins_and_did_not_run_had_no_cpu() -> None:
    """A stop that fell between two samples."""
    stall = only(Toy(in_step={AT: STALL_S}, spins=True)).worst[0]
    assert (stall.cause, stall.evidence.process) == ("off_cpu", "engine_core")


def test_many_more_requests_in_a_step_are_its_work() -> None:
    found = account(Toy(requests_from={80: 60}))
    assert found.stalls == 20 and {stall.cause for stall in found.worst} == {"batch"}


def test_one_wait_is_shared_by_the_slow_steps_around_it() -> None:
    """Two steps 250 ms late each, 300 ms of waiting between the samples around both: never more than that."""
    toy = Toy(in_step={50: 0.25, 52: 0.25})
    toy.waits = {WORKER: [(begin_of(50, toy) - 0.01, 0.0), (begin_of(54, toy), 0.3)]}
    found = account(toy)
    assert found.stalls == 2 and {stall.cause for stall in found.worst} == {"off_cpu"}
    assert found.lost_ms["off_cpu"] == pytest.approx(300.0, rel=0.01)


def test_a_front_end_that_waits_for_a_cpu_is_off_cpu_and_one_that_does_not_is_late() -> None:
    toy = Toy(way={AT: STALL_S})
    assert account(toy).worst[0].cause == "front_end"
    end = float(toy.times()[1][AT])
    toy.waits = {FRONT_END: [(end - 0.1, 0.0), (end + 0.6, 0.5)]}
    assert account(toy).worst[0].cause == "off_cpu"


def test_a_client_that_is_slow_is_told_from_a_front_end_that_is_late() -> None:
    assert account(Toy(rest={AT: STALL_S})).worst[0].cause == "client"
    assert account(Toy(rest={AT: STALL_S}, receipts=False)).worst[0].cause == "front_end"


def test_a_preempted_request_waits_alone() -> None:
    toy = Toy(without=dict.fromkeys(range(40, 60), (1,)))
    found = account(toy)
    assert (found.slow, found.worst[0].request, found.worst[0].cause) == (1, "r1", "preemption")


def test_a_request_that_misses_steps_without_a_preemption_is_not_explained() -> None:
    run = Toy(without=dict.fromkeys(range(40, 60), (1,))).run()
    requests = {**run.tables["requests"], "preemptions": np.zeros(REQUESTS, "i4")}
    found = stalls(Run(run.header, {**run.tables, "requests": requests}))
    assert (found.slow, found.worst[0].cause) == (1, "unknown")


def test_without_steps_nothing_is_explained() -> None:
    run = Toy(in_step={AT: STALL_S}).run()
    found = stalls(Run(run.header, {"tokens": run.tables["tokens"]}))
    assert (found.slow, found.stalls, list(found.causes)) == (REQUESTS, 1, ["unknown"])
    assert found.worst[0].cause == "unknown" and found.worst[0].request == "0"
    assert stalls(Run(run.header, {})) == Stalls()


def test_steps_of_two_engines_are_not_mixed() -> None:
    run = Toy(in_step={AT: STALL_S}).run()
    steps = {**run.tables["steps"], "process": np.arange(100, dtype="i2") % 2}
    assert list(stalls(Run(run.header, {**run.tables, "steps": steps})).causes) == ["unknown"]


def test_the_worst_are_different_stalls_longest_first() -> None:
    found = account(Toy(in_step={i: 0.1 * i for i in range(1, 9)}))
    assert found.stalls == 8 and found.slow == 8 * REQUESTS
    assert [round(stall.excess_ms, -1) for stall in found.worst] == [800, 700, 600, 500, 400]


def test_what_piled_up_was_made_in_steps_of_its_own() -> None:
    """Steps end at 1, 2, 3, .. s. Tokens at 1.1 and 2.1 s, then three at once at 5.1 s: made in steps 2, 3 and 4."""
    ends = np.arange(1.0, 9.0)
    found = steps_of(np.array([1.1, 2.1, 5.1]), np.array([1, 1, 3]), np.zeros(3, "i8"), ends)
    assert found.tolist() == [0, 1, 4]
    behind = steps_of(np.array([2.9, 3.0, 3.1]), np.ones(3, "i8"), np.zeros(3, "i8"), ends)
    assert behind.tolist() == [0, 1, 2]  # two tokens of one instant are of two steps
    assert steps_of(np.array([0.5]), np.ones(1, "i8"), np.zeros(1, "i8"), ends).tolist() == [-1]


@pytest.mark.parametrize("stamps", [True, False])
def test_a_front_end_that_stopped_and_then_catches_up_slowly_was_late_once(stamps: bool) -> None:
    """For half a second the engine goes on, then the front end takes a step a millisecond until it has caught up."""
    toy = Toy(steps=200, stamps=stamps)
    end = toy.times()[1]
    toy.way = {i: max(0.0, STALL_S - 0.010 * (i - AT)) for i in range(AT, 200)}
    toy.stopped = [(FRONT_END, float(end[AT]) + 0.3)]
    found = account(toy)
    assert (found.slow, found.stalls) == (REQUESTS, 1)
    assert found.causes["off_cpu"].share > 0.95


def test_a_file_without_engine_cores_times_and_a_backlog_to_the_end_is_read_by_what_is_possible() -> None:
    """With the times the front end is late; without, the latest steps that are possible are taken for the makers."""
    late = dict.fromkeys(range(AT, 100), STALL_S)
    assert account(Toy(way=late)).worst[0].cause == "front_end"
    assert account(Toy(way=late, stamps=False)).worst[0].gaps == REQUESTS


def test_stalls_are_priced_beside_the_other_limits() -> None:
    """Half a second of a run of 10 s in which nobody worked for a request: 5 %."""
    toy = Toy(in_step={AT: STALL_S})
    toy.stopped = [(WORKER, begin_of(AT, toy) + 0.2)]
    found = RunAnalysis(with_answers(toy.run())).verdict
    assert found.kind == "stalls" and found.share == pytest.approx(0.05, rel=0.01)
    assert "4 of 396 gaps between tokens were over 22 ms" in found.limit
    assert "5 % of the engine's time. In most of that, a process waited for a CPU." in found.limit
    assert found.command == "kvtune doctor tiny-opt"
    late = RunAnalysis(with_answers(Toy(before={AT: STALL_S}).run())).verdict
    assert late.kind == "stalls" and "--stacks" in late.command


def test_prefills_and_collections_lose_no_time_of_their_own() -> None:
    toy = Toy(prefill={AT: 10_000})
    assert RunAnalysis(with_answers(toy.run())).verdict.kind != "stalls"
    assert sum(account(toy).lost_ms.values()) == 0


def with_answers(run: Run) -> Run:
    """With output tokens, without which a run measured nothing."""
    requests = {**run.tables["requests"]}
    requests["output_tokens"] = np.full(len(requests["id"]), 100)
    return Run(run.header, {**run.tables, "requests": requests})


SECONDS = st.floats(0.0, 0.4)
PROCESS = st.integers(0, 2)
PLANTS = st.dictionaries(st.integers(1, 58), SECONDS, max_size=6)
WAITED = st.lists(st.tuples(st.floats(0.0, 3.0), SECONDS), max_size=8)


@st.composite
def toys(draw: st.DrawFn) -> Toy:
    waited = sorted(draw(WAITED))
    so_far = np.cumsum([wait for _, wait in waited]).tolist()
    samples = [(at, wait) for (at, _), wait in zip(waited, so_far, strict=True)]
    missing = st.sets(st.integers(0, REQUESTS - 1), min_size=1).map(tuple)
    return Toy(
        steps=60,
        in_step=draw(PLANTS),
        before=draw(PLANTS),
        way=draw(PLANTS),
        rest=draw(PLANTS),
        prefill=draw(st.dictionaries(st.integers(1, 58), st.integers(1, 4000), max_size=6)),
        without=draw(st.dictionaries(st.integers(1, 58), missing, max_size=8)),
        gc=draw(st.lists(st.tuples(PROCESS, SECONDS, SECONDS, SECONDS, PROCESS, st.just(0)), max_size=5)),
        waits=dict.fromkeys((FRONT_END, ENGINE_CORE, WORKER), samples),
        stopped=draw(st.lists(st.tuples(PROCESS, st.floats(0.0, 3.0)), max_size=3)),
        receipts=draw(st.booleans()),
        stamps=draw(st.booleans()),
        spins=draw(st.booleans()),
    )


@settings(deadline=None, max_examples=60)
@given(toys())
def test_parts_add_up_to_the_excess_and_shares_to_one_whatever_happens(toy: Toy) -> None:
    found = account(toy)
    assert sum(cause.excess_ms for cause in found.causes.values()) == pytest.approx(found.excess_ms)
    assert all(cause.excess_ms > 0 for cause in found.causes.values())
    if found.slow:
        assert sum(cause.share for cause in found.causes.values()) == pytest.approx(1.0)
    assert sum(cause.gaps for cause in found.causes.values()) == found.slow
    assert len(found.worst) == min(5, found.stalls) and found.stalls <= found.slow
    for stall in found.worst:
        assert sum(stall.parts_ms.values()) == pytest.approx(stall.excess_ms)
        assert max(stall.parts_ms.values()) == stall.parts_ms[stall.cause]
        assert found.median_ms is not None
        assert stall.gap_ms - found.median_ms == pytest.approx(stall.excess_ms)
        assert stall.evidence.process in ("", "front_end", "engine_core", "worker")
