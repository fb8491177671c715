"""Controls the garbage collector in vLLM's processes: what is frozen, and when it runs. Front end, EngineCore, workers.

vLLM freezes the heap of EngineCore and of GPU workers once they are up, but not of the front end and of CPU workers:
there each full collection walks everything that was ever imported. These are frozen here in the same way, and unfrozen
at shutdown.

| setting | where | what |
|---|---|---|
| freeze | front end, CPU worker | gc.freeze() when the engine is up |
| gc_threshold0..2 | EngineCore | gc.set_threshold() |
| collect_at_wait | EngineCore | collect while the model runs, and while there is nothing to do |
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from kvtune.core import state
from kvtune.core.settings import CoreSettings
from kvtune.vllm.patches import PATCHES
from kvtune.vllm.types import EngineCore
from kvtune.vllm.waits import Future, WatchedFuture, watch_waits

HEADROOM = 20
"""With collect_at_wait, the factor by which the first threshold is raised for all other collections."""

COLLECTOR = "kvtune_collector"
"""The attribute of an EngineCore that holds its WaitCollector, or None. It is set when the engine is up."""

PART = "freeze"
_frozen_here = False


def freeze_heap(freeze: Callable[[], None]) -> None:
    """Leave all objects that are alive now out of later collections, by vLLM's own function."""
    global _frozen_here
    freeze()
    _frozen_here = True
    state.count("heap_freezes")


def thaw_heap() -> None:
    """Undo freeze_heap, so that the objects of an engine that was shut down can be collected."""
    global _frozen_here
    if _frozen_here:
        gc.unfreeze()
        _frozen_here = False


def set_thresholds(settings: CoreSettings) -> None:
    """Set the thresholds that the settings give in EngineCore; the others stay."""
    values = (settings.gc_threshold0, settings.gc_threshold1, settings.gc_threshold2)
    if any(values):
        gc.set_threshold(*(value or now for value, now in zip(values, gc.get_threshold(), strict=True)))


def tokens_are_there(future: Future) -> bool:
    """Whether waiting for a step would take no time.

    vLLM's future of an asynchronous output is done only once `result()` ran: so the event of the tokens' copy
    is asked instead.
    """
    inner = future.inner if isinstance(future, WatchedFuture) else future
    event = getattr(getattr(inner, "async_output", None), "copy_event", None)
    ready = getattr(event, "query", None)
    return future.done() or (ready is not None and bool(ready()))


class WaitCollector:
    """Collects when EngineCore waits anyway. Raised thresholds stay as a safety net."""

    def __init__(self) -> None:
        self.thresholds = gc.get_threshold()
        gc.set_threshold(self.thresholds[0] * HEADROOM, *self.thresholds[1:])

    def collect(self) -> None:
        """Collect the oldest generation that is due, if any is."""
        young, middle, old = gc.get_count()
        first, second, third = self.thresholds
        if young < first:
            return
        generation = 0 if middle < second else 1 if old < third else 2
        gc.collect(generation)
        state.count("collections_at_wait")

    def attach(self, engine: EngineCore) -> None:
        """Collect just before EngineCore waits for a step's tokens: the step is then with the model as a whole.

        A GPU engine hands it over in two calls, and anything done between them delays sampling.
        """

        def collected_first(future: Future) -> object:
            if not tokens_are_there(future):
                self.collect()
            return future.result()

        watch_waits(engine.model_executor, collected_first)


def engine_is_up(engine: EngineCore, settings: CoreSettings) -> None:
    """Called when an EngineCore is ready; acts once for each."""
    if COLLECTOR in vars(engine):
        return
    set_thresholds(settings)
    collector = WaitCollector() if settings.collect_at_wait else None
    setattr(engine, COLLECTOR, collector)
    if collector is not None:
        collector.attach(engine)


def engine_waits(engine: EngineCore, settings: CoreSettings) -> None:
    """Called when EngineCore looks for new requests: it waits for them when it has nothing to do."""
    engine_is_up(engine, settings)
    collector: WaitCollector | None = getattr(engine, COLLECTOR)
    if collector is not None and not engine.has_work():
        collector.collect()


def install(settings: CoreSettings) -> None:
    """Apply the settings in this process, whichever of vLLM's it is."""
    uninstall()
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    thresholds = settings.gc_threshold0 or settings.gc_threshold1 or settings.gc_threshold2
    if thresholds or settings.collect_at_wait:
        # EngineCore in its own process loads plugins during __init__: there it is up when its loop starts.
        PATCHES.after(PART, EngineCore, "__init__", lambda engine: engine_is_up(engine, settings))
        PATCHES.before(
            PART, EngineCoreProc, "_process_input_queue", lambda engine: engine_waits(engine, settings)
        )
    state.part("collect_at_wait", settings.collect_at_wait)
    if settings.freeze:
        _install_freeze()
    state.part("freeze", settings.freeze)


def uninstall() -> None:
    """Undo `install`; frozen heaps stay frozen until shutdown."""
    PATCHES.undo(PART)


def _install_freeze() -> None:
    from vllm.platforms import current_platform
    from vllm.utils.gc_utils import freeze_gc_heap
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import MPClient
    from vllm.v1.engine.llm_engine import LLMEngine

    for front_end in (AsyncLLM, LLMEngine):
        PATCHES.after(PART, front_end, "__init__", lambda _: freeze_heap(freeze_gc_heap))
    PATCHES.after(PART, MPClient, "shutdown", lambda _: thaw_heap())
    if state.workers and current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        PATCHES.after(PART, CPUWorker, "compile_or_warm_up_model", lambda _: freeze_heap(freeze_gc_heap))
