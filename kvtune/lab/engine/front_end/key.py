"""Lets only kvtune's own client ask the server of a run: each route wants a key that is drawn for the run.

A server in development mode has routes that call any method of a worker, and vLLM's own key guards none of them. The
server's process reads the key from its environment, so no list of processes shows it. Runs in each API server.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

VARIABLE = "VLLM_API_KEY"
MIDDLEWARE = f"{__name__}.OwnClientOnly"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def header(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class OwnClientOnly:
    """A middleware (ASGI) that answers 401 to every request, and closes every websocket, without the key."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._wanted = header(os.environ[VARIABLE])["Authorization"].encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = [value for name, value in scope.get("headers", ()) if name == b"authorization"]
        if scope["type"] == "lifespan" or (len(given) == 1 and hmac.compare_digest(given[0], self._wanted)):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b""})
