"""Long and dirty traffic for a running server, and a recording of what server and client saw. Imports no vLLM.

Sessions with tool turns and sub-agents, time stamps at a prompt's beginning, shuffled documents, floods, prompts of
several prefill chunks, aborted requests, cache salts, `/reset_prefix_cache`. The client keeps each request's token ids
and what `usage` says: the truth beside which kvtune's figures stand (`tests/servers/watch/truth.py`).
"""

from __future__ import annotations

import asyncio
import json
import lzma
import random
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

FIRST_WORD = 10
WORDS = 400
STAMP = 19
"""Position of the token that is a time stamp."""
SCRAPE_S = 0.5
HISTOGRAMS = ("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds")


def kept_lines(text: str) -> str:
    """The lines of /metrics that matter: vLLM's series, of its histograms two."""
    return "\n".join(
        line
        for line in text.split("\n")
        if line.startswith(("vllm:", "process_start_time"))
        and "_created" not in line
        and ("_bucket" not in line or line.startswith(HISTOGRAMS))
    )


@dataclass(frozen=True, slots=True)
class Sent:
    """A request and its answer. `hit` -1: the client broke it off. `kind` is the part of the traffic."""

    kind: str
    prompt: list[int]
    answer: list[int]
    t0: float
    t1: float
    hit: int
    salt: str = ""
    life: int = 0
    """How often the server had been restarted before."""
    resets: int = 0
    """How often its cache had been reset before."""


@dataclass
class Traffic:
    """Prompts by a seed. `scale`: how much longer they are where the server's blocks are large."""

    base: str
    model: str
    seed: int = 1
    scale: int = 1
    life: int = 0
    sent: list[Sent] = field(default_factory=list)
    resets: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        self.system = self.words(197 * self.scale)
        self.documents = [self.words((96 + 7 * n) * self.scale) for n in range(8)]

    def words(self, count: int) -> list[int]:
        return [FIRST_WORD + self.draw.randrange(WORDS) for _ in range(count)]

    async def send(self, kind: str, prompt: Sequence[int], output: int, salt: str = "") -> list[int]:
        body: dict[str, Any] = {"model": self.model, "prompt": list(prompt), "max_tokens": output}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body |= {"cache_salt": salt} if salt else {}
        resets, t0 = self.resets, time.time()
        try:
            answer = await self.client.post(f"{self.base}/v1/completions", json=body)
        except asyncio.CancelledError:
            self._keep(kind, prompt, [], t0, -1, salt, resets)
            raise
        assert answer.status_code == 200, answer.text
        got = answer.json()
        hit = (got["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        ids: list[int] = got["choices"][0]["token_ids"]
        self._keep(kind, prompt, ids, t0, hit, salt, resets)
        return ids

    def _keep(
        self, kind: str, prompt: Sequence[int], answer: list[int], t0: float, hit: int, salt: str, resets: int
    ) -> None:
        self.sent.append(Sent(kind, list(prompt), answer, t0, time.time(), hit, salt, self.life, resets))

    async def session(self, number: int, turns: int, *, stamped: bool = False, agents: int = 1) -> None:
        """One agent: each turn has all turns before it, and asks sub-agents that share its system prompt."""
        text = [*self.system, *self.words((32 + 3 * number) * self.scale)]
        for turn in range(turns):
            if stamped:
                text[STAMP] = FIRST_WORD + (10 * number + turn) % WORDS
            answer = await self.send("stamped" if stamped else "session", text, 9 + 5 * number)
            subs = (
                self.send("agent", [*self.system, *self.words(70 * self.scale + 9 * agent)], 6)
                for agent in range(agents if turn == 1 else 0)
            )
            await asyncio.gather(*subs)
            text = [*text, *answer, *self.words((25 + 11 * number) * self.scale)]

    async def query(self, number: int) -> None:
        chosen = self.draw.sample(self.documents, 3)
        text = [*self.system[: 64 * self.scale], *(word for one in chosen for word in one)]
        await self.send("documents", [*text, *self.words(20 + number)], 5)

    async def flood(self, count: int) -> None:
        texts = [self.words(640 * self.scale) for _ in range(count)]
        await asyncio.gather(*(self.send("flood", text, 4) for text in texts))

    async def long(self, tokens: int) -> None:
        """Unrelated prompts of several chunks with the same first words; then each once more, with another end."""
        head = self.words(STAMP)
        texts = [[*head, *self.words(tokens)] for _ in range(3)]
        await asyncio.gather(*(self.send("long", text, 3) for text in texts))
        for text in texts[:2]:
            await self.send("long again", [*text[: int(0.8 * tokens)], *self.words(tokens // 4)], 3)

    async def aborted(self, count: int, tokens: int) -> None:
        """Requests that the client breaks off; some are being computed then, the others wait."""
        texts = [self.words(tokens) for _ in range(count)]
        tasks = [asyncio.create_task(self.send("aborted", text, 4)) for text in texts]
        await asyncio.sleep(0.15)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(2 * SCRAPE_S)

    async def salted(self) -> None:
        text = self.words(291 * self.scale)
        for salt in ("", "one", "two", "one", ""):
            await self.send("salted", [*text, *self.words(12)], 4, salt)

    async def reset(self) -> None:
        await asyncio.sleep(SCRAPE_S)
        answer = await self.client.post(f"{self.base}/reset_prefix_cache")
        assert answer.status_code == 200, answer.text
        self.resets += 1

    async def run(self) -> list[Sent]:
        async with self._client():
            await self.sessions()
            for first in range(0, 12, 4):
                await asyncio.gather(*(self.query(first + n) for n in range(4)))
            await self.long(2_400 + 400 * self.scale)
            await self.salted()
            await self.flood(9)
            await self.session(1, 3, agents=0)
            await self.aborted(4, 2_400 + 400 * self.scale)
            text = self.words(265 * self.scale)
            await self.send("before reset", text, 4)
            await self.reset()
            await self.send("after reset", [*text, *self.words(9)], 4)
            await self.query(30)
            await asyncio.sleep(2.5 * SCRAPE_S)
        return self.sent

    async def short(self) -> list[Sent]:
        """The same sessions and documents, as after a restart."""
        async with self._client():
            await self.sessions()
            await asyncio.gather(*(self.query(n) for n in range(4)))
            await asyncio.sleep(2.5 * SCRAPE_S)
        return self.sent

    async def sessions(self) -> None:
        await asyncio.gather(*(self.session(n, 4, stamped=n in (2, 4), agents=2) for n in range(6)))

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[None]:
        import httpx

        async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=200)) as client:
            self.client = client
            yield


class Listener:
    """What a server publishes: the raw event batches, and /metrics every half a second."""

    def __init__(self, base: str) -> None:
        import zmq

        with urllib.request.urlopen(f"{base}/kv_event_sources", timeout=30) as answer:
            endpoint = json.load(answer)["0"]["endpoint"].replace("*", "127.0.0.1")
        self._base = base
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(endpoint)
        self.batches: list[tuple[int, bytes]] = []
        self.samples: list[tuple[float, str]] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=run) for run in (self._listen, self._scrape)]
        time.sleep(0.5)
        for thread in self._threads:
            thread.start()

    def _listen(self) -> None:
        while not self._stop.is_set():
            while self._socket.poll(50):
                _, number, payload = self._socket.recv_multipart()
                self.batches.append((int.from_bytes(number, "big"), payload))

    def _scrape(self) -> None:
        while not self._stop.is_set():
            with urllib.request.urlopen(f"{self._base}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            self.samples.append((time.time(), kept_lines(text)))
            self._stop.wait(SCRAPE_S)

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._socket.close(linger=0)
        self._context.term()


def write(path: Path, lives: Sequence[Listener], sent: Sequence[Sent]) -> None:
    """Write a recording: for each life of the server its batches and samples, and the client's requests."""
    document = {
        "lives": [
            {
                "batches": one.batches,
                "samples": one.samples,
            }
            for one in lives
        ],
        "sent": [asdict(row) for row in sent],
    }
    path.write_bytes(lzma.compress(msgspec.msgpack.encode(document), preset=9))
