"""A seeded load of token-id prompts with every kind of hit and miss, sent to a server; each request's truth is kept.

Imports no vLLM. `write` makes a log as `--requests` reads it.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

WORDS = 400
FIRST_WORD = 10


@dataclass(frozen=True, slots=True)
class Sent:
    """A request and its answer. Times are time.time()."""

    name: str
    prompt: list[int]
    answer: list[int]
    t0: float
    t1: float
    hit: int


@dataclass(frozen=True, slots=True)
class Ask:
    name: str
    prompt: list[int]
    output: int


class Load:
    """Prompts by a seed. `sequential` come one after another; `concurrent` are groups that come at once."""

    def __init__(self, seed: int, scale: int = 1) -> None:
        self.draw = random.Random(seed)
        self.scale = scale
        self.prefix = self.words(600 * scale)
        self.other = self.words(450 * scale)

    def words(self, count: int) -> list[int]:
        return [FIRST_WORD + self.draw.randrange(WORDS) for _ in range(count)]

    def changed(self, prompt: Sequence[int], at: int) -> list[int]:
        """Another token at this place, the rest as it was."""
        return [*prompt[:at], FIRST_WORD + (prompt[at] - FIRST_WORD + 1) % WORDS, *prompt[at + 1 :]]

    def sequential(self) -> list[Ask]:
        asks = [Ask(f"prefix {n}", [*self.prefix, *self.words(40 + n)], 8) for n in range(4)]
        asks += [Ask(f"diverged {at}", self.changed(self.prefix, at), 8) for at in (200, 207, 214)]
        asks += [Ask(f"other {n}", [*self.other, *self.words(33)], 5) for n in range(3)]
        asks += [Ask("repeat", list(self.prefix[:512]), 4)] * 2
        asks += [Ask(f"short {n}", self.words(5 + 9 * n), 3) for n in range(5)]
        asks += [Ask(f"flood {n}", self.words(900 * self.scale), 4) for n in range(8)]
        asks += [Ask(f"after flood {n}", [*self.prefix, *self.words(20)], 4) for n in range(2)]
        return asks

    def concurrent(self) -> list[list[Ask]]:
        same = [*self.other, *self.words(64)]
        together = [Ask(f"together {n}", self.words(500 + 10 * n), 60) for n in range(14)]
        return [[Ask("same", same, 8)] * 4, together]


async def send_all(base: str, model: str, load: Load, *, crowd: bool = True) -> list[Sent]:
    import httpx

    sent: list[Sent] = []
    async with httpx.AsyncClient(verify=False, timeout=None) as client:

        async def send(ask: Ask) -> Sent:
            body = {"model": model, "prompt": ask.prompt, "max_tokens": ask.output, "temperature": 0}
            body |= {"ignore_eos": True, "return_token_ids": True}
            t0 = time.time()
            answer = await client.post(f"{base}/v1/completions", json=body)
            t1 = time.time()
            assert answer.status_code == 200, answer.text
            got = answer.json()
            hit = (got["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            return Sent(ask.name, ask.prompt, got["choices"][0]["token_ids"], t0, t1, hit)

        sent += [await send(ask) for ask in load.sequential()]
        turns = load.words(70)
        for turn in range(6):
            sent.append(await send(Ask(f"turn {turn}", list(turns), 30)))
            turns = [*turns, *sent[-1].answer, *load.words(25)]
        for group in load.concurrent() if crowd else []:
            sent += await asyncio.gather(*map(send, group))
    return sent


def write(sent: Sequence[Sent], path: Path) -> None:
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in sent))
