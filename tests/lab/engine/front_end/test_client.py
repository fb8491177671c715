"""The client of a server: what it asks, how it cuts the stream into events, and what it keeps of a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kvtune.lab.engine.driver import RequestLog, read_request_log
from kvtune.lab.engine.front_end.client import Events, HttpDriver
from kvtune.lab.engine.messages import Served
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Workload

VOCAB = 500
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def tokens(ids: list[int], finish: str | None = None) -> bytes:
    return event(
        {"id": "x", "choices": [{"index": 0, "text": "", "finish_reason": finish, "token_ids": ids}]}
    )


def usage(hits: int) -> bytes:
    return event(
        {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": hits}}}
    )


STREAM = tokens([1]) + tokens([2, 3]) + tokens([4], "length") + usage(16) + b"data: [DONE]\n\n"


@pytest.mark.parametrize("size", [1, 7, 50, len(STREAM)])
def test_events_are_whole_however_the_bytes_are_cut(size: int) -> None:
    events = Events()
    chunks = [c for at in range(0, len(STREAM), size) for c in events.take(STREAM[at : at + size])]
    assert [choice.token_ids for chunk in chunks for choice in chunk.choices] == [[1], [2, 3], [4]]
    assert chunks[-1].usage is not None and len(chunks) == 4


def driven(folder: Path, workload: Workload, answer: Handler) -> tuple[HttpDriver, list[Served]]:
    """One pass over the workload against a server that answers so."""

    async def drive() -> HttpDriver:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            log = RequestLog(folder / "requests.bin")
            driver = HttpDriver(session, f"http://127.0.0.1:{port}", workload, VOCAB, log)
            await driver.run(lambda start: None)
        await runner.cleanup()
        return driver

    return asyncio.run(drive()), sorted(read_request_log(folder / "requests.bin"), key=lambda s: s.index)


def streaming(seen: list[dict[str, object]], stream: bytes = STREAM) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(stream)
        return response

    return answer


def test_a_requests_tokens_times_and_hits_are_kept(tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []
    workload = build("prefill:requests=2,prompt=9,output=4")
    driver, served = driven(tmp_path, workload, streaming(seen))
    assert driver.failure is None and (driver.sent, driver.finished, driver.output_tokens) == (2, 2, 8)
    for one in served:
        assert (one.output_tokens, one.hit_tokens, one.finish) == (4, 16, "length")
        assert one.sent_ns < one.finished_ns and len(one.counts) == 3 * 4 and not one.made
    assert served[0].answer_crc == served[1].answer_crc != 0
    asked = seen[0]
    assert (asked["max_tokens"], asked["temperature"], asked["ignore_eos"]) == (4, 0.0, True)
    prompt = asked["prompt"]
    assert isinstance(prompt, list) and len(prompt) == 9 and max(prompt) < VOCAB


def test_an_answer_is_part_of_the_next_prompt_of_its_session(tmp_path: Path) -> None:
    seen: list[dict[str, object]] = []
    workload = build("chat:sessions=1,turns=2,output=4")
    driven(tmp_path, workload, streaming(seen))
    first, second = (asked["prompt"] for asked in seen)
    assert isinstance(first, list) and isinstance(second, list)
    assert second[len(first) : len(first) + 4] == [1, 2, 3, 4]


@pytest.mark.parametrize("said", ["refused", "in the stream"])
def test_what_the_server_says_of_a_failure_is_the_failure(tmp_path: Path, said: str) -> None:
    async def refused(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long a prompt"}}, status=400)

    answer = (
        refused if said == "refused" else streaming([], event({"error": {"message": "too long a prompt"}}))
    )
    driver, served = driven(tmp_path, build("prefill:requests=1,prompt=9,output=4"), answer)
    assert driver.failure is not None and "too long a prompt" in str(driver.failure)
    assert served[0].finish == "error"


def test_a_lost_connection_says_that_the_server_is_gone(tmp_path: Path) -> None:
    async def lost(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 1 << 20
        await response.prepare(request)
        await response.write(tokens([1]))
        assert request.transport is not None
        request.transport.abort()
        return response

    driver, served = driven(tmp_path, build("prefill:requests=1,prompt=9,output=4"), lost)
    assert driver.failure is not None and driver.says_dead(driver.failure)
    assert (served[0].finish, served[0].output_tokens, served[0].finished_ns) == ("", 1, 0)
