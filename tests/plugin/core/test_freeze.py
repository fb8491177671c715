"""Settings of the garbage collector: a frozen heap is unfrozen, collections happen while EngineCore waits."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from typing import Any

import pytest

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import freeze, state
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.waits import watch_waits


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.freeze()


def test_thaw_undoes_freeze_and_nothing_else() -> None:
    gc.freeze()
    held = gc.get_freeze_count()
    freeze.thaw_heap()
    # Frozen by somebody else. Other threads may end a few of the objects.
    assert gc.get_freeze_count() > held // 2
    STATE.frozen = True
    freeze.thaw_heap()
    assert gc.get_freeze_count() == 0
    gc.freeze()
    freeze.thaw_heap()
    assert gc.get_freeze_count() > 0, "thawed twice"


def test_thresholds_that_are_not_named_stay() -> None:
    gc.set_threshold(700, 10, 10)
    freeze.set_thresholds(CoreSettings(gc_threshold0=5000, gc_threshold2=30))
    assert gc.get_threshold() == (5000, 10, 30)


class Pending:
    """A step's tokens, that are not there until somebody waits for them."""

    def __init__(self, events: list[str], *, ready: bool = False) -> None:
        self._events, self._ready = events, ready

    def done(self) -> bool:
        return self._ready

    def result(self, timeout: float | None = None) -> str:
        self._events.append("tokens are in")
        self._ready = True
        return "tokens"


@pytest.fixture
def events() -> Iterator[list[str]]:
    """What happened, collections included; garbage is due."""
    gc.set_threshold(700, 10, 10)
    gc.collect()
    seen: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(f"collected {info['generation']}")

    gc.callbacks.append(note)
    yield seen
    gc.callbacks.remove(note)


def an_engine(events: list[str], *, ready: bool = False) -> Any:
    """An engine whose executor takes a step in two calls, with a collector attached to it."""

    def execute_model(output: object, non_block: bool = False) -> Pending:
        events.append("handed over")
        return Pending(events, ready=True)

    def sample_tokens(grammar: object, non_block: bool = False) -> Pending | str:
        events.append("sampling")
        return Pending(events, ready=ready) if non_block else "tokens"

    executor = types.SimpleNamespace(execute_model=execute_model, sample_tokens=sample_tokens)
    engine = types.SimpleNamespace(model_executor=executor)
    freeze.WaitCollector().attach(engine)  # type: ignore[arg-type]
    return engine


def test_a_collection_comes_when_the_step_is_with_the_model_before_its_tokens_are_waited_for(
    events: list[str],
) -> None:
    executor = an_engine(events).model_executor
    young = [[] for _ in range(2000)]
    executor.execute_model(None, non_block=True)
    tokens = executor.sample_tokens(None, non_block=True)
    assert events == ["handed over", "sampling"], "the device has the whole step before anything is collected"
    assert tokens.result() == "tokens"
    assert events == ["handed over", "sampling", "collected 0", "tokens are in"]
    assert len(young) == 2000


def test_nothing_is_collected_where_nobody_waits(events: list[str]) -> None:
    executor = an_engine(events, ready=True).model_executor
    young = [[] for _ in range(2000)]
    executor.execute_model(None, non_block=True).result()
    executor.sample_tokens(None, non_block=True).result()
    assert executor.sample_tokens(None) == "tokens"
    assert not [event for event in events if event.startswith("collected")] and len(young) == 2000


@pytest.mark.parametrize("there", [True, False])
def test_tokens_whose_copy_has_ended_are_there_although_nobody_asked_for_the_result(
    there: bool, events: list[str]
) -> None:
    """vLLM's future of an asynchronous output is done only once `result()` ran: where the host limits, tokens wait."""
    event = types.SimpleNamespace(query=lambda: there)

    def sample_tokens(grammar: object, non_block: bool = False) -> Pending:
        tokens = Pending(events)
        tokens.async_output = types.SimpleNamespace(copy_event=event)  # type: ignore[attr-defined]
        return tokens

    executor = types.SimpleNamespace(execute_model=lambda *_, **__: None, sample_tokens=sample_tokens)
    watch_waits(executor, lambda future: future.result())  # type: ignore[arg-type]
    freeze.WaitCollector().attach(types.SimpleNamespace(model_executor=executor))  # type: ignore[arg-type]
    young = [[] for _ in range(2000)]
    executor.sample_tokens(None, non_block=True).result()
    assert events == (["tokens are in"] if there else ["collected 0", "tokens are in"])
    assert len(young) == 2000


def test_an_error_turns_one_switch_off_and_never_reaches_the_engine() -> None:
    called = []

    def fails() -> None:
        called.append(1)
        raise RuntimeError("ours")

    for _ in range(3):
        freeze.or_off("freeze", fails)
    assert called == [1]
    reported = state.state()
    assert reported["parts"]["freeze"] is False
    assert "freeze: off after an error: RuntimeError: ours" in reported["notes"]
