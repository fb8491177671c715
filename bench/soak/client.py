"""One client of a soak: sends a request over HTTP as its `Ask` says, and keeps what came back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Literal

import aiohttp

from bench.soak.trouble import Ask, prompt

MODEL = "m"
SLOW_S = 0.08
LEAVES_S = 0.01
"""A client that leaves waits so long for its request to arrive."""

Ended = Literal["answered", "refused", "left", "broken", "never"]
"""Refused: an HTTP error. Left: the client closed the connection. Broken: the server did."""


@dataclass(slots=True)
class Answer:
    """`tokens`, `texts` and `finish` by choice. `gaps`: seconds between events of a stream that was read at once."""

    ended: Ended = "never"
    status: int = 0
    error: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: list[list[str]] = field(default_factory=list)
    logprobs: int = 0
    usage: int = -1
    ends: int = 0
    first_s: float = 0.0
    gaps: list[float] = field(default_factory=list)

    def choice(self, index: int) -> int:
        while len(self.tokens) <= index:
            self.tokens.append([])
            self.texts.append("")
            self.finish.append([])
        return index


def body(seed: int, ask: Ask) -> dict[str, Any]:
    """The request's JSON."""
    made: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt(seed, ask),
        "max_tokens": ask.output,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "priority": ask.priority,
    }
    # Without a seed: vLLM 0.32's CPU worker dies of one where a prompt takes two steps (its generator has no offset).
    sampled: dict[str, Any] = {"temperature": 0.8}
    specials: dict[str, dict[str, Any]] = {
        "logprobs": {"logprobs": 3},
        "stop": {"stop": ["e", "ing"], "allowed_token_ids": list(range(3, 480))},
        "json": {"structured_outputs": {"regex": "[a-z ]{4,40}"}, "ignore_eos": False},
        "choices": {**sampled, "n": 3},
        "sampled": sampled,
        "unknown model": {"model": "another"},
    }
    made |= specials.get(ask.special, {})
    if ask.client != "whole":
        made |= {"stream": True, "stream_options": {"include_usage": True}}
    return made


async def send(
    session: aiohttp.ClientSession, base: str, seed: int, ask: Ask, others_done: asyncio.Event
) -> Answer:
    """Whatever happens is in the answer; raises only what cancels."""
    answer = Answer()
    try:
        request = session.post(f"{base}/v1/completions", json=body(seed, ask))
        if ask.client == "leaves":
            return await _leave(request)
        async with request as response:
            answer.status = response.status
            if response.status != 200:
                answer.ended, answer.error = "refused", _error(await response.text())
            elif ask.client == "whole":
                _take(answer, await response.json())
                answer.ends, answer.ended = 1, "answered"
            else:
                await _read(response, ask, answer, others_done)
    except (aiohttp.ClientError, ConnectionError, json.JSONDecodeError) as error:
        answer.ended, answer.error = "broken", f"{type(error).__name__}: {error}"
    return answer


async def _leave(request: Any) -> Answer:
    """Close the connection before the first token, or as soon as there is an answer."""

    async def open_it() -> None:
        async with request as response:
            response.close()

    task = asyncio.create_task(open_it())
    await asyncio.wait([task], timeout=LEAVES_S)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return Answer("left")


async def _read(
    response: aiohttp.ClientResponse, ask: Ask, answer: Answer, others_done: asyncio.Event
) -> None:
    last, events = monotonic(), 0
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        now = monotonic()
        if line.startswith(b"data: [DONE]"):
            answer.ends += 1
            continue
        _take(answer, json.loads(line[6:]))
        events += 1
        if events == 1:
            answer.first_s = now
        elif ask.client == "reads":
            answer.gaps.append(now - last)
        last = now
        if ask.client == "cuts" and events >= ask.after:
            response.close()
            answer.ended = "left"
            return
        if ask.client == "slow":
            await asyncio.sleep(SLOW_S)
        elif ask.client == "stuck" and events == 1:
            await others_done.wait()
    answer.ended = "answered" if answer.ends and not answer.error else "broken"


def _take(answer: Answer, data: dict[str, Any]) -> None:
    """Add an event, or a whole answer."""
    if "error" in data:
        answer.error = _error(json.dumps(data))
    for choice in data.get("choices", ()):
        index = answer.choice(choice["index"])
        answer.tokens[index] += choice.get("token_ids") or []
        answer.texts[index] += choice["text"]
        if choice["finish_reason"]:
            answer.finish[index].append(choice["finish_reason"])
        if choice.get("logprobs"):
            answer.logprobs += len(choice["logprobs"]["tokens"])
    if data.get("usage"):
        answer.usage = data["usage"]["completion_tokens"]


def _error(text: str) -> str:
    """An error's message; the text as it is where it is not vLLM's JSON."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text
