"""Installs columns between EngineCore and AsyncLLM (`core.front_end`). Each process installs its own side."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from kvtune.data.knobs import CoreSettings
from kvtune.plugin.core import state
from kvtune.plugin.core.breaker import Breaker, breaker_of
from kvtune.plugin.core.outputs.message import MARK, OUTLET, asked_by, asking
from kvtune.plugin.vllm.plugin_state import STATE

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
    from vllm.v1.metrics.stats import IterationStats

    from kvtune.plugin.core.outputs.columns import ColumnReader
    from kvtune.plugin.core.outputs.outlet import Outlet

logger = logging.getLogger("vllm.kvtune")

PART = "outputs.install"

READER = "kvtune_column_reader"
"""Name of the attribute that holds the ColumnReader, on an OutputProcessor and on its engine client."""
Result = TypeVar("Result")


def install(settings: CoreSettings) -> None:
    """Send and read columns in every AsyncLLM and EngineCore that is built from now on."""
    STATE.patches.undo(PART)
    if not settings.front_end:
        return
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    from kvtune.plugin.core.outputs.metrics import wrap_record

    STATE.patches.wrap(PART, EngineCore, "abort_requests", wrap_abort)
    STATE.patches.wrap(PART, EngineCore, "_attach_weight_version", _wrap_finished_step)
    STATE.patches.after(PART, AsyncLLM, "__init__", _built)
    STATE.patches.wrap(PART, AsyncMPClient, "get_output_async", _wrap_get_output)
    STATE.patches.wrap(PART, OutputProcessor, "add_request", _wrap_add)
    STATE.patches.wrap(PART, OutputProcessor, "process_outputs", _wrap_process)
    STATE.patches.wrap(PART, PrometheusStatLogger, "record", wrap_record)
    state.part("front_end", True)


def adopt(processor: OutputProcessor) -> None:
    """Make an OutputProcessor read columns. It must have no requests yet."""
    from kvtune.plugin.core.outputs.columns import ColumnReader

    setattr(processor, READER, ColumnReader(processor))


def _built(front_end: AsyncLLM) -> None:
    try:
        adopt(front_end.output_processor)
        setattr(front_end.engine_core, READER, getattr(front_end.output_processor, READER))
        _ask(front_end.engine_core)
    except Exception as error:
        state.part("front_end", False, f"could not be put in: {error!r}")
        logger.error("kvtune: outputs come as vLLM sends them", exc_info=error)


def _ask(client: AsyncMPClient) -> None:
    """Tell each EngineCore that this client reads columns. Works before the event loop runs."""
    import zmq
    from vllm.v1.engine import EngineCoreRequestType

    socket: zmq.Socket[bytes] = zmq.Socket.shadow(client.input_socket)
    message = client.encoder.encode([asking(client.client_index)])
    for engine in client.core_engines:
        socket.send_multipart((engine, EngineCoreRequestType.ABORT.value, *message))


def wrap_abort(abort: Callable[[EngineCore, list[str]], None]) -> Callable[[EngineCore, list[str]], None]:
    def aborted(self: EngineCore, request_ids: list[str]) -> None:
        names = _breaker(self).attempt(_without_asking, self, request_ids)
        abort(self, request_ids if names is None else names)

    return aborted


def _breaker(engine: EngineCore) -> Breaker:
    return breaker_of(getattr(getattr(engine, "scheduler", None), "kv_cache_manager", engine))


def _without_asking(engine: EngineCore, request_ids: list[str]) -> list[str]:
    """Send columns from now on to clients that ask for them by aborting an id. Return the ids of real requests."""
    from kvtune.plugin.core.outputs.outlet import Outlet

    asked = [name for name in request_ids if name.startswith(MARK)]
    index = getattr(engine, "engine_index", None)  # only an EngineCore in its own process has one
    for client in map(asked_by, asked):
        if client is None or index is None:
            continue
        outlet = getattr(engine, OUTLET, None)
        if outlet is None:
            outlet = Outlet(index, _breaker(engine))
            setattr(engine, OUTLET, outlet)
            setattr(engine.scheduler, OUTLET, outlet)
        outlet.ask(client)
    return [name for name in request_ids if name not in asked] if asked else request_ids


def _wrap_finished_step(attach: Callable[..., None]) -> Callable[..., None]:
    """Pack a step's outputs as columns after `attach`, EngineCore's last change to them."""

    def attached(self: EngineCore, outputs: dict[int, EngineCoreOutputs]) -> None:
        attach(self, outputs)
        if hasattr(self, OUTLET):
            _breaker(self).attempt(_pack, self, outputs)

    return attached


def _pack(engine: EngineCore, outputs: dict[int, EngineCoreOutputs]) -> None:
    outlet: Outlet = getattr(engine, OUTLET)
    alive = engine.scheduler.requests
    for client, output in outputs.items():
        output.outputs = outlet.pack(client, output.outputs, alive)
    if not alive:
        outlet.rest()


def _wrap_get_output(
    get: Callable[[AsyncMPClient], Awaitable[Result]],
) -> Callable[[AsyncMPClient], Awaitable[Result]]:
    async def got(self: AsyncMPClient) -> Result:
        reader: ColumnReader | None = getattr(self, READER, None)
        if reader is not None:
            try:
                await reader.wake_all()
            except Exception as error:
                reader.retire(error)
        return await get(self)

    return got


def _wrap_add(add: Callable[..., None]) -> Callable[..., None]:
    def added(self: OutputProcessor, request: EngineCoreRequest, *args: object, **options: object) -> None:
        add(self, request, *args, **options)
        reader: ColumnReader | None = getattr(self, READER, None)
        if reader is not None:
            reader.add(request.request_id)

    return added


def _wrap_process(process: Callable[..., OutputProcessorOutput]) -> Callable[..., OutputProcessorOutput]:
    def processed(
        self: OutputProcessor,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        weight_version: str | None = None,
    ) -> OutputProcessorOutput:
        outputs = engine_core_outputs
        if outputs and outputs[-1].request_id == MARK:
            reader: ColumnReader = getattr(self, READER)
            outputs = reader.process(outputs, engine_core_timestamp, iteration_stats, weight_version)
        return process(self, outputs, engine_core_timestamp, iteration_stats, weight_version)

    return processed
