"""The driver for a server: POSTs each request's token ids and records the times of the answer's events.

Each request has its own connection, so that vLLM chooses an API server for each. Events contain token ids, so that
tokens can be counted and answers compared. Runs in the host process.
"""

from __future__ import annotations

from time import monotonic_ns

import aiohttp
import msgspec

from kvtune.lab.engine.driver import Answer, Driver, RequestLog
from kvtune.lab.engine.front_end.messages import Chunk
from kvtune.requests.types import Request, Workload

NAME = "model"
"""The model's name in requests."""

END = b"\n\n"
DATA = b"data: "
DONE = b"[DONE]"

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Chunk).decode


def body(request: Request, ids: list[int]) -> bytes:
    """Return the body for `/v1/completions`: token ids in and out, the full number of tokens, temperature 0."""
    asked = {
        "model": NAME,
        "prompt": ids,
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    return _encode(asked)


class Events:
    """Splits a stream's bytes into complete events."""

    def __init__(self) -> None:
        self._rest = b""

    def take(self, data: bytes) -> list[Chunk]:
        *events, self._rest = (self._rest + data).split(END)
        texts = (event.removeprefix(DATA) for event in events if event.startswith(DATA))
        return [_decode(text) for text in texts if text != DONE]


class HttpDriver(Driver):
    def __init__(
        self, session: aiohttp.ClientSession, base: str, workload: Workload, vocab_size: int, log: RequestLog
    ) -> None:
        super().__init__(workload, vocab_size, log)
        self._session = session
        self._url = f"{base}/v1/completions"

    def says_dead(self, error: Exception) -> bool:
        return isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError)

    async def ask(self, index: int, request: Request, ids: list[int], answer: Answer) -> None:
        headers = {"Content-Type": "application/json"}
        events = Events()
        async with self._session.post(self._url, data=body(request, ids), headers=headers) as response:
            if response.status != 200:
                text = (await response.text())[:300]
                raise RuntimeError(f"vLLM's server answered a request with {response.status}: {text}")
            async for data in response.content.iter_any():
                now = monotonic_ns()
                for chunk in events.take(data):
                    self._took(chunk, now, answer)

    def _took(self, chunk: Chunk, now: int, answer: Answer) -> None:
        if chunk.error is not None:
            raise RuntimeError(f"vLLM's server ended a stream with an error: {chunk.error.message[:300]}")
        for choice in chunk.choices:
            if choice.token_ids:
                answer.times.append(now)
                answer.counts.append(len(choice.token_ids))
                answer.tokens.extend(choice.token_ids)
                self.output_tokens += len(choice.token_ids)
            if choice.finish_reason is not None:
                answer.finish, answer.ended = choice.finish_reason, now
        if chunk.usage is not None and chunk.usage.prompt_tokens_details is not None:
            answer.hits = chunk.usage.prompt_tokens_details.cached_tokens or 0
