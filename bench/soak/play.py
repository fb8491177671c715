"""A round of trouble against both servers at once -> their answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from bench.soak.client import MODEL, Answer, body, send
from bench.soak.judge import Parted
from bench.soak.servers import Server
from bench.soak.trouble import Ask, Fault, Round, prompt

ROUND_S = 240.0
"""A request that has no answer so long after its round began never gets one."""
LAST_ROUND_S = 15.0
"""So long clients wait in the round that SIGTERM ends: vLLM's servers, stock's too, leave some without an answer."""

Answers = dict[int, Answer]


@asynccontextmanager
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A connection for each request, as strangers' clients have."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        yield session


@dataclass(slots=True)
class Players:
    """Sends rounds; keeps what the wall clocks are ahead by. Clients go away after `patience_s`."""

    session: aiohttp.ClientSession
    seed: int
    patience_s: float = ROUND_S
    clock_s: float = 0.0

    async def play(self, servers: Sequence[Server], trouble: Round) -> list[Answers]:
        """The answers of each server, by request; of requests that were never answered too."""
        others_done = [asyncio.Event() for _ in servers]
        sides = [
            asyncio.create_task(self._side(server, trouble, done))
            for server, done in zip(servers, others_done, strict=True)
        ]
        faults = asyncio.create_task(self._faults(servers, trouble.faults))
        answers = await asyncio.gather(*sides)
        result = (await asyncio.gather(faults, return_exceptions=True))[
            0
        ]  # one may meet a server that has died
        if isinstance(result, AssertionError):
            raise result
        return list(answers)

    async def _side(self, server: Server, trouble: Round, others_done: asyncio.Event) -> Answers:
        async def one(ask: Ask) -> Answer:
            await asyncio.sleep(ask.at_s)
            return await send(self.session, server.base, self.seed, ask, others_done)

        tasks = {ask: asyncio.create_task(one(ask)) for ask in trouble.asks}
        others = [task for ask, task in tasks.items() if ask.client != "stuck"]
        if others:
            await asyncio.wait(others, timeout=self.patience_s)
        others_done.set()
        _, pending = await asyncio.wait(tasks.values(), timeout=self.patience_s / 4)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        return {ask.number: Answer() if task.cancelled() else task.result() for ask, task in tasks.items()}

    async def _faults(self, servers: Sequence[Server], faults: Sequence[Fault]) -> None:
        async def one(fault: Fault) -> None:
            await asyncio.sleep(fault.at_s)
            if fault.kind == "clock":
                self.clock_s += fault.value
            await asyncio.gather(*(server.suffer(self.session, fault, self.clock_s) for server in servers))

        await asyncio.gather(*map(one, faults))

    async def margin(self, stock: Server, ask: Ask, parted: Parted) -> float:
        """By how much stock likes its token more than the core's, in nats, when it is asked alone."""
        whole = {**body(self.seed, ask), "prompt": [*prompt(self.seed, ask), *parted.common]}
        whole |= {"max_tokens": 1, "logprobs": 20, "return_tokens_as_token_ids": True, "model": MODEL}
        for name in ("stream", "stream_options", "structured_outputs", "stop"):
            whole.pop(name, None)
        async with self.session.post(f"{stock.base}/v1/completions", json=whole) as answer:
            assert answer.status == 200, await answer.text()
            (choice,) = (await answer.json())["choices"]
        (top,) = choice["logprobs"]["top_logprobs"]
        core, other = (top.get(f"token_id:{token}") for token in (parted.core, parted.stock))
        return abs(core - other) if core is not None and other is not None else float("inf")
