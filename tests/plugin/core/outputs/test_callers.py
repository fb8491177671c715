"""Who is woken by a step, what a caller that goes away leaves behind, and how the two sides find each other."""

from __future__ import annotations

import asyncio
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core.breaker import Breaker
from kvtune.plugin.core.outputs import install
from kvtune.plugin.core.outputs.message import MARK, OUTLET, asked_by, asking, columns_of
from tests.plugin.core.outputs.column_rig import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    IterationStats,
    Outlet,
    OutputProcessor,
    RequestOutputCollector,
    RequestOutputKind,
    SamplingParams,
)

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def installed() -> None:
    install.install(CoreSettings())


class Engine:
    """An output processor with columns, and what sends to it."""

    def __init__(self, count: int, kind: RequestOutputKind, interval: int = 1) -> None:
        self.processor = OutputProcessor(None, log_stats=True, stream_interval=interval)
        install.adopt(self.processor)
        self.outlet = Outlet(0, Breaker())
        self.outlet.ask(0)
        self.queues: list[RequestOutputCollector] = []
        for number in range(count):
            params = SamplingParams(output_kind=kind, detokenize=False)
            request = EngineCoreRequest(
                f"r{number}", [1], None, params, None, 0.0, None, None, None, external_req_id=f"e{number}"
            )
            self.queues.append(RequestOutputCollector(kind, request.request_id))
            self.processor.add_request(request, None, None, 0, self.queues[-1])
        self.ids = [f"r{number}" for number in range(count)]
        self.step(0)

    @property
    def reader(self) -> Any:
        return getattr(self.processor, install.READER)

    def step(self, token: int, finish: FinishReason | None = None) -> None:
        outputs = [EngineCoreOutput(name, [token], finish_reason=finish) for name in self.ids]
        packed = self.outlet.pack(0, outputs, self.ids)
        self.processor.process_outputs(packed, 1.0, IterationStats())


def test_callers_that_want_only_the_end_are_not_woken_before_it() -> None:
    engine = Engine(8, RequestOutputKind.FINAL_ONLY)
    for token in range(1, 6):
        engine.step(token)
    assert not any(queue.ready.is_set() or queue.output for queue in engine.queues)
    engine.step(6, FinishReason.LENGTH)
    for queue in engine.queues:
        output = queue.get_nowait()
        assert output is not None and output.finished
        assert list(output.outputs[0].token_ids) == list(range(7))


@pytest.mark.parametrize(
    ("interval", "chunk"), [(1, [[0], [1], [2], [3], [4], [5]]), (2, [[0], [1, 2], [3, 4], [5]])]
)
def test_each_of_many_callers_takes_its_tokens_before_the_next_step(
    interval: int, chunk: list[list[int]]
) -> None:
    """Also where steps are there faster than callers are woken: chunks are as fine as stock's."""
    chunks: list[list[list[int]]] = [[] for _ in range(300)]

    async def caller(queue: RequestOutputCollector, mine: list[list[int]]) -> None:
        finished = False
        while not finished:
            output = queue.get_nowait() or await queue.get()
            mine.append(list(output.outputs[0].token_ids))
            finished = output.finished

    async def run() -> None:
        engine = Engine(300, RequestOutputKind.DELTA, interval)
        callers = [
            asyncio.create_task(caller(queue, mine))
            for queue, mine in zip(engine.queues, chunks, strict=True)
        ]
        await asyncio.sleep(0)
        for token in range(1, 5):
            await engine.reader.wake_all()  # what the client does before it looks at the next message
            engine.step(token)
        await engine.reader.wake_all()
        engine.step(5, FinishReason.LENGTH)
        await asyncio.gather(*callers)

    asyncio.run(run())
    assert chunks == [chunk] * 300


def test_a_caller_that_is_cancelled_leaves_no_state_behind() -> None:
    async def run() -> None:
        engine = Engine(8, RequestOutputKind.DELTA)
        engine.step(1)
        queue = engine.queues[3]
        assert queue.get_nowait() is not None
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        state = weakref.ref(engine.processor.request_states["r3"])
        assert engine.processor.abort_requests(["r3"], internal=True) == ["r3"]
        # EngineCore has not heard of it yet.
        engine.step(2)
        del engine.queues[3], queue, waiting
        assert state() is None, "by reference counts: the collector may not run for long"
        assert [list(q.get_nowait().outputs[0].token_ids) for q in engine.queues] == [[0, 1, 2]] * 7

    asyncio.run(run())


def test_an_error_reaches_callers_that_wait_and_callers_that_are_late() -> None:
    async def run() -> None:
        engine = Engine(4, RequestOutputKind.DELTA)
        for queue in engine.queues:
            queue.get_nowait()
        waiting = [asyncio.create_task(queue.get()) for queue in engine.queues[:2]]
        await asyncio.sleep(0)
        engine.processor.propagate_error(ValueError("dead"))
        for task in waiting:
            with pytest.raises(ValueError, match="dead"):
                await task
        with pytest.raises(ValueError, match="dead"):
            engine.queues[3].get_nowait()

    asyncio.run(run())


def test_an_error_in_one_callers_collector_is_that_callers_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("ours")

    engine = Engine(4, RequestOutputKind.DELTA)
    monkeypatch.setattr(engine.queues[1], "_put_earlier", fails, raising=False)
    made = engine.queues[0].get_nowait()
    for queue in engine.queues:
        queue.put(made)
    with pytest.raises(RuntimeError, match="ours"):
        engine.queues[1].get_nowait()
    for queue in (engine.queues[0], *engine.queues[2:]):
        assert queue.get_nowait() is not None


def core(index: int | None = 0) -> Any:
    engine = SimpleNamespace(scheduler=SimpleNamespace(requests={}), aborted=[])
    if index is not None:
        engine.engine_index = index
    return engine


ABORT = install.wrap_abort(lambda engine, ids: engine.aborted.extend(ids))  # type: ignore[attr-defined]


def outputs(count: int = 8) -> list[EngineCoreOutput]:
    return [EngineCoreOutput(f"r{i}", [i]) for i in range(count)]


def test_an_engine_sends_columns_only_to_clients_that_asked() -> None:
    engine = core()
    ABORT(engine, [asking(1), "a request"])
    assert engine.aborted == ["a request"]
    outlet = getattr(engine, OUTLET)
    assert getattr(engine.scheduler, OUTLET) is outlet
    assert outlet.reads_columns(1) and not outlet.reads_columns(0)
    plain = outputs()
    assert outlet.pack(0, plain, ()) is plain
    assert [one.request_id for one in outlet.pack(1, plain, ())] == [MARK]


def test_an_engine_inside_the_front_ends_process_has_no_outlet() -> None:
    engine = core(index=None)
    ABORT(engine, [asking(0)])
    assert not hasattr(engine, OUTLET) and engine.aborted == []


def test_another_version_of_the_message_is_not_asked_for() -> None:
    assert asked_by(asking(3)) == 3
    assert asked_by(asking(3).replace("/1/", "/2/")) is None
    assert asked_by("a request") is None and asked_by(f"{MARK}/x") is None


def test_stock_ignores_what_a_client_asks() -> None:
    """The id of no request: vLLM's scheduler passes over it."""
    from tests.plugin.core.steady_rig import RequestStatus, Shape, build

    scheduler = build(Shape())
    assert scheduler.finish_requests([asking(0)], RequestStatus.FINISHED_ABORTED) == []


def test_fewer_plain_outputs_than_are_worth_a_column_stay_as_they_are() -> None:
    outlet = Outlet(0, Breaker())
    outlet.ask(0)
    few = outputs(3)
    assert outlet.pack(0, few, ()) is few
    mixed = [*outputs(3), EngineCoreOutput("end", [1], finish_reason=FinishReason.STOP)]
    assert outlet.pack(0, mixed, ()) is mixed


def test_slots_of_requests_that_are_gone_are_given_out_again_and_a_dead_row_keeps_its_own() -> None:
    """A step in flight still has the rows of requests that were aborted after it was scheduled."""
    outlet = Outlet(0, Breaker())
    outlet.ask(0)
    first = [f"a{i}" for i in range(200)]
    outlet.pack(0, [EngineCoreOutput(name, [1]) for name in first], first)
    ids = ["a0", *(f"b{i}" for i in range(100))]
    rows = SimpleNamespace(ids=ids, client=0)
    output = outlet.steady(rows, list(range(101)), [], [0], alive=set(ids[1:]))
    assert output is not None
    columns = columns_of(output)
    assert columns.slots is not None and len(columns.slots) == 100
    assert sorted(name for _, name in columns.named) == sorted(ids[1:])
    assert max(slot for slot, _ in columns.named) < 200


def test_an_outlet_that_fails_leaves_its_outputs_to_stock() -> None:
    outlet = Outlet(0, Breaker())
    outlet.ask(0)
    plain = outputs()
    assert outlet.pack(0, plain, alive=()) is not plain
    many = [EngineCoreOutput(f"b{i}", [i]) for i in range(200)]
    assert outlet.pack(0, many, alive=None) is many  # type: ignore[arg-type]
    assert not outlet.reads_columns(0)
