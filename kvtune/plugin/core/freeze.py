"""Controls garbage collection in vLLM's processes: which heaps are frozen, and when collections run.

Runs in the front end, EngineCore and workers. vLLM freezes the heap (`gc.freeze`) of EngineCore and of GPU workers
after start-up. It does not freeze the front end and CPU workers, where each full collection scans every imported
module. This module freezes those in the same way, and unfreezes the front end at shutdown.

| setting | where | what |
|---|---|---|
| freeze | front end, CPU worker | gc.freeze() when the engine is up |
| gc_threshold0..2 | EngineCore | gc.set_threshold() |
| collect_at_wait | EngineCore | collect while the model runs, and while there is nothing to do |
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import ParamSpec

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.vllm.plugin_state import STATE
from kvtune.plugin.vllm.types import EngineCore
from kvtune.plugin.vllm.waits import Future, WatchedFuture, watch_waits

HEADROOM = 20
"""collect_at_wait multiplies the first gc threshold by this, so that few collections run at other moments."""

COLLECTOR = "kvtune_collector"
"""Name of the EngineCore attribute that holds its WaitCollector, or None without collect_at_wait."""

PART = "freeze"
COLLECTS = "collect_at_wait"

P = ParamSpec("P")
logger = logging.getLogger("vllm.kvtune")


def freeze_heap(freeze: Callable[[], None]) -> None:
    """Exclude all live objects from later collections. `freeze` is vLLM's own function for that."""
    freeze()
    STATE.frozen = True
    state.count("heap_freezes")


def thaw_heap() -> None:
    """Undo `freeze_heap`, so that the objects of an engine that was shut down can be collected."""
    if STATE.frozen:
        gc.unfreeze()
        STATE.frozen = False


def set_thresholds(settings: CoreSettings) -> None:
    """Set EngineCore's gc thresholds; a setting of 0 leaves that threshold as it is."""
    values = (settings.gc_threshold0, settings.gc_threshold1, settings.gc_threshold2)
    if any(values):
        gc.set_threshold(*(value or now for value, now in zip(values, gc.get_threshold(), strict=True)))


def tokens_are_there(future: Future) -> bool:
    """Whether a step's tokens have arrived, so that waiting for them would take no time.

    vLLM's future of an asynchronous output is done only after `result()` ran, so this also queries the event of the
    tokens' copy.
    """
    inner = future.inner if isinstance(future, WatchedFuture) else future
    event = getattr(getattr(inner, "async_output", None), "copy_event", None)
    ready = getattr(event, "query", None)
    return future.done() or (ready is not None and bool(ready()))


class WaitCollector:
    """Collects garbage while EngineCore waits anyway. Python's own collections stay on, at raised thresholds."""

    def __init__(self) -> None:
        self.thresholds = gc.get_threshold()
        gc.set_threshold(self.thresholds[0] * HEADROOM, *self.thresholds[1:])

    def collect(self) -> None:
        """Collect the oldest generation whose threshold is reached, if any."""
        young, middle, old = gc.get_count()
        first, second, third = self.thresholds
        if young < first:
            return
        oldest = 1 if old < third else 2
        gc.collect(0 if middle < second else oldest)
        state.count("collections_at_wait")

    def attach(self, engine: EngineCore) -> None:
        """Collect just before EngineCore waits for a step's tokens, when the whole step was submitted to the model.

        A GPU engine submits a step in two calls, and a collection between them would delay sampling.
        """

        def collect_if_waiting(future: Future) -> None:
            if not tokens_are_there(future):
                self.collect()

        def collected_first(future: Future) -> object:
            or_off(COLLECTS, collect_if_waiting, future)
            return future.result()

        watch_waits(engine.model_executor, collected_first)


def or_off(switch: str, act: Callable[P, object], *args: P.args, **options: P.kwargs) -> None:
    """Call `act` unless it has failed before. If it raises, the switch is off in this process, for good."""
    if switch in STATE.failed:
        return
    try:
        act(*args, **options)
    except Exception as error:
        STATE.failed.add(switch)
        state.part(switch, False, f"off after an error: {type(error).__name__}: {error}")
        logger.error("kvtune: %s is off", switch, exc_info=error)


def engine_is_up(engine: EngineCore, settings: CoreSettings) -> None:
    """Apply the settings to an EngineCore that has started; further calls for the same engine do nothing."""
    if COLLECTOR in vars(engine):
        return
    set_thresholds(settings)
    collector = WaitCollector() if settings.collect_at_wait else None
    setattr(engine, COLLECTOR, collector)
    if collector is not None:
        collector.attach(engine)


def engine_waits(engine: EngineCore, settings: CoreSettings) -> None:
    """Collect garbage if EngineCore has nothing to do; called each time it looks for new requests."""
    engine_is_up(engine, settings)
    collector: WaitCollector | None = getattr(engine, COLLECTOR)
    if collector is not None and not engine.has_work():
        collector.collect()


def install(settings: CoreSettings) -> None:
    """Patch the vLLM classes of this process (front end, EngineCore or worker) as the settings say."""
    STATE.patches.undo(PART)
    STATE.failed.clear()
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    thresholds = settings.gc_threshold0 or settings.gc_threshold1 or settings.gc_threshold2
    if thresholds or settings.collect_at_wait:
        # An EngineCore in its own process loads plugins inside __init__: its first poll then counts as its start.
        STATE.patches.after(
            PART, EngineCore, "__init__", lambda engine: or_off(COLLECTS, engine_is_up, engine, settings)
        )
        STATE.patches.before(
            PART,
            EngineCoreProc,
            "_process_input_queue",
            lambda engine: or_off(COLLECTS, engine_waits, engine, settings),
        )
    state.part("collect_at_wait", settings.collect_at_wait)
    if settings.freeze:
        _install_freeze()
    state.part("freeze", settings.freeze)


def _install_freeze() -> None:
    from vllm.platforms import current_platform
    from vllm.utils.gc_utils import freeze_gc_heap
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import MPClient
    from vllm.v1.engine.llm_engine import LLMEngine

    for front_end in (AsyncLLM, LLMEngine):
        STATE.patches.after(
            PART, front_end, "__init__", lambda _: or_off("freeze", freeze_heap, freeze_gc_heap)
        )
    STATE.patches.after(PART, MPClient, "shutdown", lambda _: or_off("freeze", thaw_heap))
    if STATE.workers and current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        STATE.patches.after(
            PART,
            CPUWorker,
            "compile_or_warm_up_model",
            lambda _: or_off("freeze", freeze_heap, freeze_gc_heap),
        )
