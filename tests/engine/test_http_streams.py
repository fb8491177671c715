"""`vllm serve` with the core and HTTP clients that stream: killed ones, ones that stop reading, two API servers."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtune.engine.models import builtin
from kvtune.engine.sockets import socket_folder
from kvtune.fake_device.cost import StepCost
from kvtune.fake_device.settings import Timed, write_device
from tests.engine import serving
from tests.engine.serving import (
    Streamed,
    asking,
    environment,
    flags,
    last,
    metric,
    read_all,
    served,
    stream,
    tokenizer_in,
)

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1200)]

MODEL = "m"
KILLED = 100
STUCK = 8
"""At least as many as outputs travel as columns, of one API server and of each of two."""
LONG = 20_000
"""Tokens whose events, 6 MB, fit into no socket: Linux lets one hold up to 4."""
DEVICE = Timed(
    cost=StepCost(step_us=200.0, prefill_token_us=0.0, decode_us=100.0, kv_token_us=0.0), name="test"
)


@dataclass(frozen=True, slots=True)
class Server:
    base: str
    servers: int

    async def census(self) -> list[dict[str, int]]:
        """Of each API server. Which of them takes a new connection is the kernel's choice: many are made at once."""
        import httpx

        found: dict[int, dict[str, int]] = {}
        fresh = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=60.0, limits=fresh) as client:
            for _ in range(50):
                for answer in await asyncio.gather(
                    *(client.get(f"{self.base}/census") for _ in range(16 * self.servers))
                ):
                    found[int(answer.headers[serving.PID])] = answer.json()
                if len(found) == self.servers:
                    return list(found.values())
        raise AssertionError(f"{len(found)} of {self.servers} API servers answered")

    async def running(self) -> float:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return sum([await asyncio.to_thread(metric, self.base, name) for name in names])

    async def until_idle(self) -> None:
        await until(lambda: self.running(), lambda left: left == 0)
        await until(self.census, lambda each: not any(left(one) for one in each))

    @asynccontextmanager
    async def nothing_left(self) -> AsyncIterator[None]:
        """What requests leave behind in the front ends: nothing, and no task more than before."""
        assert {(await read_all(self.base, asking(n, 4, MODEL))).tokens for n in range(2 * self.servers)} == {
            4
        }
        await self.until_idle()
        tasks = sum(one["tasks"] for one in await self.census())
        yield
        await self.until_idle()
        after = await self.census()
        assert all(one["column_engines"] for one in after), "outputs came as columns"
        # A census counts its own requests, of which several are under way.
        assert sum(one["tasks"] for one in after) <= tasks + 4 * self.servers


def left(one: dict[str, int]) -> int:
    return sum(one[name] for name in ("states", "state_objects", "collectors", "rows", "rows_in_slots"))


async def until(look: Callable[[], object], enough: Callable[[object], bool], limit_s: float = 90.0) -> None:
    end = time.monotonic() + limit_s
    while not enough(seen := await look()):  # type: ignore[misc]
        assert time.monotonic() < end, f"after {limit_s:.0f} s: {seen}"
        await asyncio.sleep(0.5)


@pytest.fixture(scope="module", params=[1, 2], ids=["one server", "two servers"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """With the core, on a device that takes longer the more requests it has."""
    folder = tmp_path_factory.mktemp("served")
    write_device(DEVICE, folder)
    script = Path(__file__).with_name("serve_on_host.py")
    words = flags("tiny-llama", MODEL, tokenizer_in(folder), request.param)
    with (
        socket_folder() as sockets,
        served(
            folder,
            [sys.executable, str(script), str(builtin("tiny-llama"))],
            words,
            {**environment("kvtune", folder), **sockets},
        ) as base,
    ):
        yield Server(base, request.param)


async def complete(base: str, numbers: Sequence[int], tokens: int) -> list[Streamed]:
    """Streams that are read to their end."""
    read = await asyncio.gather(*(read_all(base, asking(number, tokens, MODEL)) for number in numbers))
    for each in read:
        assert (each.tokens, each.finish, each.done) == (tokens, "length", True)
    return read


def test_a_client_that_is_killed_leaves_nothing_and_others_read_on(server: Server) -> None:
    async def run() -> None:
        async with server.nothing_left():
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, serving.__file__, server.base, str(KILLED), "20000", MODEL),
                stdout=asyncio.subprocess.PIPE,
                cwd=Path(__file__).parents[2],
            )
            try:
                assert client.stdout is not None
                assert await asyncio.wait_for(client.stdout.readline(), 120) == b"streaming\n"
                others = asyncio.create_task(complete(server.base, range(8), 400))
                await asyncio.sleep(1.0)
                assert await server.running() >= KILLED
            finally:
                client.send_signal(signal.SIGKILL)
                await client.wait()
            await others
            # Long before the killed client's streams would have ended.
            await until(lambda: server.running(), lambda left: left == 0, limit_s=30.0)

    asyncio.run(run())


def test_a_client_that_stops_reading_holds_up_nobody_and_gets_the_rest_when_it_reads_on(
    server: Server,
) -> None:
    async def run() -> None:
        async with server.nothing_left(), AsyncExitStack() as stack:
            stuck = []
            for number in range(STUCK):
                opened = stream(server.base, asking(number, LONG, MODEL), buffer=4096)
                stuck.append(await stack.enter_async_context(opened))
            await asyncio.gather(*(anext(each) for each in stuck))
            await complete(server.base, range(20, 28), 400)
            await until(lambda: server.running(), lambda left: left == 0, limit_s=300.0)
            held = await server.census()
            assert sum(one["states"] for one in held) == 0
            assert sum(one["collectors"] for one in held) == STUCK, "their sockets are full"
            texts = await asyncio.gather(*map(last, stuck))
            for number, seen in enumerate(texts):
                assert (seen.tokens, seen.finish, seen.done) == (LONG, "length", True), number
            # The device's tokens are all the same.
            (short,) = await complete(server.base, [0], 100)
            assert {seen.text for seen in texts} == {short.text * (LONG // 100)}

    asyncio.run(run())


def test_two_api_servers_answer_alike_with_the_core_and_without(tmp_path: Path) -> None:
    """A real model, streams and whole answers at once."""
    words = flags("tiny-opt", MODEL, tokenizer_in(tmp_path), 2)
    command = [sys.executable, "-m", "kvtune.engine.serve", str(builtin("tiny-opt"))]
    answers = {}
    for core in ("kvtune", "stock"):
        with (
            socket_folder() as sockets,
            served(tmp_path, command, words, {**environment(core, tmp_path), **sockets}) as base,
        ):
            answers[core] = asyncio.run(answered(Server(base, 2), core))
    assert answers["kvtune"] == answers["stock"]


async def answered(server: Server, core: str) -> list[str]:
    import httpx

    def body(number: int) -> dict[str, object]:
        return {**asking(number, 60, MODEL), "allowed_token_ids": list(range(3, 400))}

    async def whole(client: httpx.AsyncClient, number: int) -> tuple[int, str]:
        answer = await client.post(f"{server.base}/v1/completions", json=body(number))
        (choice,), usage = answer.json()["choices"], answer.json()["usage"]
        assert (choice["finish_reason"], usage["completion_tokens"]) == ("length", 60)
        return int(answer.headers[serving.PID]), choice["text"]

    async with httpx.AsyncClient(timeout=None) as client:
        streams = [read_all(server.base, body(number)) for number in range(16)]
        wholes = [whole(client, number) for number in range(16)]
        streamed, at_once = await asyncio.gather(asyncio.gather(*streams), asyncio.gather(*wholes))
    assert {(each.tokens, each.finish, each.done) for each in streamed} == {(60, "length", True)}
    pids = [*(each.pid for each in streamed), *(pid for pid, _ in at_once)]
    assert min(pids.count(pid) for pid in set(pids)) >= 8 and len(set(pids)) == 2, "both have their share"
    by_column = [one["column_engines"] > 0 for one in await server.census()]
    assert by_column == [core == "kvtune"] * 2
    texts = [text for _, text in at_once]
    assert [each.text for each in streamed] == texts
    assert len(set(texts)) > 8 and all(texts)
    return texts
