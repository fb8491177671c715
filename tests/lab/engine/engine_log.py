"""Loaded by a test's `vllm serve`: it notes what its engine is given and what that answers, a line a prompt.

vllm serve MODEL --middleware tests.lab.engine.engine_log.Front
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "ENGINE_LOG"
"""The file of the lines."""


@dataclass
class Noted:
    """One prompt. `hit`: -1 before the engine's first answer. `answer`: of the first choice."""

    session: str
    t0: float
    prompt: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    hit: int = -1


class Front:
    """An ASGI application around vLLM's."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: MutableMapping[str, Any], receive: object, send: object) -> None:
        if scope["type"] == "http":
            client = scope["app"].state.engine_client
            if "generate" not in vars(client):
                client.generate = noting(client.generate)
        await self._app(scope, receive, send)


def noting(generate: Callable[..., AsyncIterator[Any]]) -> Callable[..., AsyncIterator[Any]]:
    """The engine's `generate`, which notes each prompt at its end, also of a client that leaves."""

    async def noted(prompt: Any, params: Any, *args: Any, **named: Any) -> AsyncIterator[Any]:
        row = Noted(named.get("session_id") or "", time.time())
        try:
            async for output in generate(prompt, params, *args, **named):
                row.prompt = list(output.prompt_token_ids)
                if output.num_cached_tokens is not None:
                    row.hit = output.num_cached_tokens
                tokens = list(output.outputs[0].token_ids)
                row.answer = row.answer + tokens if params.output_kind.name == "DELTA" else tokens
                yield output
        finally:
            with Path(os.environ[VARIABLE]).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")

    return noted
