"""Settings of the garbage collector: a frozen heap is unfrozen, collections happen while EngineCore waits."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from typing import Any

import pytest

from kvtune.core import freeze
from kvtune.core.settings import CoreSettings


@pytest.fixture(autouse=True)
def collector_as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_thaw_undoes_freeze_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freeze, "_frozen_here", False)
    gc.freeze()
    held = gc.get_freeze_count()
    freeze.thaw_heap()
    assert gc.get_freeze_count() == held  # frozen by somebody else
    monkeypatch.setattr(freeze, "_frozen_here", True)
    freeze.thaw_heap()
    assert gc.get_freeze_count() == 0
    gc.freeze()
    freeze.thaw_heap()
    assert gc.get_freeze_count() > 0, "thawed twice"


def test_after_passes_results_on_and_comes_last() -> None:
    seen: list[str] = []

    class Engine:
        def start(self, name: str) -> str:
            seen.append(name)
            return name * 2

    freeze.after(Engine, "start", lambda engine: seen.append(type(engine).__name__))
    assert Engine().start("a") == "aa"
    assert seen == ["a", "Engine"]


def test_uninstall_restores_the_wrapped_methods() -> None:
    class Engine:
        def start(self) -> int:
            return 1

    start = vars(Engine)["start"]
    freeze.after(Engine, "start", lambda engine: None)
    freeze.before(Engine, "start", lambda engine: None)
    assert vars(Engine)["start"] is not start
    assert Engine().start() == 1
    freeze.uninstall()
    assert vars(Engine)["start"] is start


def test_thresholds_that_are_not_named_stay() -> None:
    gc.set_threshold(700, 10, 10)
    freeze.set_thresholds(CoreSettings(gc_threshold0=5000, gc_threshold2=30))
    assert gc.get_threshold() == (5000, 10, 30)


def test_collections_come_at_the_wait() -> None:
    gc.set_threshold(700, 10, 10)
    gc.collect()
    events: list[tuple[str, int]] = []
    executor: Any = types.SimpleNamespace(
        execute_model=lambda output, non_block=False: events.append(("handed over", 0))
    )
    collector = freeze.WaitCollector()
    collector.attach(types.SimpleNamespace(model_executor=executor))

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            events.append(("collected", info["generation"]))

    gc.callbacks.append(note)
    try:
        executor.execute_model(None, non_block=True)
        young = [[] for _ in range(2000)]
        assert events == [("handed over", 0)]
        executor.execute_model(None, non_block=True)
    finally:
        gc.callbacks.remove(note)
    assert events == [("handed over", 0), ("handed over", 0), ("collected", 0)]
    assert len(young) == 2000
