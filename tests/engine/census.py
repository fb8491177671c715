"""What an API server holds of its requests, for tests: ASGI middleware that answers GET /census, and signs answers.

vllm serve MODEL --middleware tests.engine.census.Census
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

PID = b"x-server-pid"
"""The header that says which process answered."""


class Census:
    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def signed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (PID, str(os.getpid()).encode())]
            await send(message)

        if scope["type"] != "http" or scope["path"] != "/census":
            await self._app(scope, receive, signed)
            return
        body = json.dumps(census(scope["app"].state.engine_client)).encode()
        await signed({"type": "http.response.start", "status": 200, "headers": []})
        await signed({"type": "http.response.body", "body": body})


def census(engine: Any) -> dict[str, int]:
    """Counts of what lives as long as a request."""
    from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

    from kvtune.core.outputs.install import READER
    from kvtune.core.outputs.rows import Row

    gc.collect()
    kinds = (RequestState, RequestOutputCollector, Row)
    objects = [each for each in gc.get_objects() if isinstance(each, kinds)]
    reader = getattr(engine.output_processor, READER, None)
    slots = [] if reader is None else list(reader._engines.values())
    return {
        "states": len(engine.output_processor.request_states),
        "state_objects": sum(isinstance(each, RequestState) for each in objects),
        "collectors": sum(isinstance(each, RequestOutputCollector) for each in objects),
        "rows": sum(isinstance(each, Row) for each in objects),
        "rows_in_slots": sum(row is not None for each in slots for row in each.rows),
        "tasks": len(asyncio.all_tasks()),
        "column_engines": len(slots),
    }
