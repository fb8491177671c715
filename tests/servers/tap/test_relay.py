"""The relay on real sockets: the same bytes as without it, the same ends, and no trouble that it adds."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import random
import ssl
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kvtune.base.errors import UsageError
from kvtune.servers.tap import exchange, relay
from kvtune.servers.tap.exchange import Numbers
from kvtune.servers.tap.relay import HIGH, Target, target_of
from tests.choice import each_value
from tests.servers.tap.wire import LOCAL, PREFIX, Handler, cut, exchanged, relayed, reset, server, until

CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def on_a_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The test as a function that pytest calls."""

    @functools.wraps(test)
    def run(*words: Any, **more: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(120):
                await test(*words, **more)

        asyncio.run(limited())

    return run


def answering(length: int, times: int = 1) -> Handler:
    """Read `times` requests with bodies of this length, and answer each."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(times):
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(length)
            writer.write(OK)

    return handler


def asked(body: bytes) -> bytes:
    return CHAT + b"Content-Length: %d\r\n\r\n" % len(body) + body


def bodies() -> list[bytes]:
    """Requests as odd as clients send them: pipelined one after another."""
    draw = random.Random(7)
    odd = [
        b"",
        b"{}",
        b"\x00\xff" * 50,
        json.dumps({"a": "ü\n" * 99}).encode(),
        b"\r\n\r\nPOST / HTTP/1.1\r\n\r\n",
    ]
    odd += [draw.randbytes(length) for length in (70_000, *(draw.randrange(1, 7_000) for _ in range(19)))]
    requests = [asked(body) for body in odd]
    requests += [
        CHAT + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX: y\r\n\r\n",
        b"GET /v1/models?x=%20 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nhost: a\r\nEXPECT: 100-continue\r\ncontent-length: 4\r\n\r\nabcd",
        b"DELETE /v1/responses/x HTTP/1.1\r\nHost: a\r\n\r\n",
    ]
    return requests


def replies() -> list[bytes]:
    stream = b"".join(b"data: {%d}\n\n" % n for n in range(200))
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in cut(stream, 77))
    return [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
        + pieces
        + b"0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b'HTTP/1.1 400 Bad\r\ncontent-length: 14\r\n\r\n{"error": "x"}',
    ]


@pytest.mark.parametrize(("size", "session"), each_value([7, 65_536], [False, True]))
@on_a_loop
async def test_the_server_and_the_client_get_the_same_bytes_as_without_a_relay(
    size: int, session: bool
) -> None:
    """The client ends its side first, and still gets its answers."""
    requests, answers = bodies(), replies()
    sent = b"".join(requests)
    got: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came = bytearray()
        while data := await reader.read(1 << 16):
            came += data
        got.append(bytes(came))
        for piece in cut(b"".join(answers), size):
            writer.write(piece)
            await writer.drain()

    async with server(handler) as port, relayed(port, session=session) as tap:
        direct = await exchanged(port, cut(sent, size))
        through = await exchanged(tap.port, cut(sent, size))
        assert hashlib.sha256(direct).digest() == hashlib.sha256(through).digest()
        lines = [line for line in got[1].split(b"\r\n") if not line.startswith(b"X-Session-ID: kvtune-test-")]
        assert hashlib.sha256(got[0]).digest() == hashlib.sha256(b"\r\n".join(lines)).digest()
        recorded = sum(one.startswith((CHAT, b"POST /v1/messages")) for one in requests)
        assert got[1].count(b"X-Session-ID: ") == (recorded if session else 0)
        await until(lambda: len(tap.heard.asked_) == recorded)


@on_a_loop
async def test_a_body_of_20_megabytes_is_recorded_whole() -> None:
    body = random.Random(1).randbytes(20 << 20)

    async with server(answering(len(body))) as port, relayed(port) as tap:
        assert await exchanged(tap.port, [asked(body)], end=False) == OK
        assert tap.heard.asked_ == [(1, body, False)]
        assert tap.relay.numbers.budget.held == 0


async def _waits(reader: asyncio.StreamReader, ended: list[str]) -> None:
    try:
        while await reader.read(1 << 16):
            pass
        ended.append("end")
    except ConnectionError:
        ended.append("reset")


@pytest.mark.parametrize("leaves", ["end", "reset"])
@pytest.mark.parametrize("begun", [False, True])
@on_a_loop
async def test_a_client_that_leaves_is_seen_by_the_server_also_before_the_first_byte(
    leaves: str, begun: bool
) -> None:
    ended: list[str] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if begun:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
        await _waits(reader, ended)

    async with server(handler) as port, relayed(port) as tap:
        reader, writer = await asyncio.open_connection(LOCAL, tap.port)
        writer.write(asked(b"{}"))
        if begun:
            await reader.readuntil(b"ab\r\n")
        else:
            await until(lambda: bool(tap.heard.asked_))
        if leaves == "reset":
            reset(writer)
        else:
            writer.close()
        await until(lambda: bool(ended), "the server sees it")
        await until(lambda: bool(tap.heard.answered_))
        assert tap.heard.answered_[0][3] == "client"
        assert ended == [leaves]


@on_a_loop
async def test_a_server_that_breaks_off_breaks_off_for_the_client() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab")
        await writer.drain()
        await asyncio.sleep(0.05)
        reset(writer)

    async with server(handler) as port, relayed(port) as tap:
        for at in (port, tap.port):
            reader, writer = await asyncio.open_connection(LOCAL, at)
            writer.write(asked(b"{}"))
            assert await reader.readexactly(40) == b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nab"[:40]
            with pytest.raises(ConnectionResetError):
                while await reader.read(100):
                    pass
            writer.close()
        assert tap.heard.answered_ == [(1, 200, b"ab", "server")]


STREAMS = """
import socket
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
while True:
    client, _ = listening.accept()
    client.recv(1 << 16)
    client.sendall(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n2\\r\\nab\\r\\n")
"""


@on_a_loop
async def test_a_server_that_is_killed_in_a_stream_broke_off_not_the_client_that_then_leaves() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STREAMS, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    port = int(await process.stdout.readline())
    async with relayed(port) as tap:
        reader, writer = await asyncio.open_connection(LOCAL, tap.port)
        writer.write(asked(b"{}"))
        await reader.readuntil(b"ab\r\n")
        process.kill()
        await process.wait()
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: bool(tap.heard.answered_))
        assert tap.heard.answered_ == [(1, 200, b"ab", "server")]


@on_a_loop
async def test_what_is_held_passes_when_the_server_speaks_or_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: foo\r\n\r\n"
    got: list[bytes] = []

    async def upgrades(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(switch)
        got.append(await reader.readexactly(5))
        writer.write(b"done")

    async def by_lines(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.readline())
        writer.write(b"an answer without a head")
        writer.close()

    monkeypatch.setattr(exchange, "HELD_S", (600.0, 600.0))
    async with server(upgrades) as port, relayed(port) as tap:
        reader, writer = await asyncio.open_connection(LOCAL, tap.port)
        writer.write(b"GET /ws HTTP/1.1\r\nUpgrade: foo\r\n\r\nHELLO")
        assert await reader.readexactly(len(switch) + 4) == switch + b"done"
        writer.close()
    monkeypatch.setattr(exchange, "HELD_S", (0.01, 600.0))
    async with server(by_lines) as port, relayed(port) as tap:
        reader, writer = await asyncio.open_connection(LOCAL, tap.port)
        writer.write(b"GET /\r\n")
        assert await reader.read() == b"an answer without a head"
        writer.close()
    assert got == [b"HELLO", b"GET /\r\n"]


@on_a_loop
async def test_what_a_client_sends_before_its_head_is_whole_is_not_lost_at_its_end() -> None:
    got: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.append(await reader.read())

    async with server(handler) as port, relayed(port) as tap:
        await exchanged(tap.port, [b"POST /v1/messages HTTP/1.1\r\nHo"])
        assert got == [b"POST /v1/messages HTTP/1.1\r\nHo"]


@on_a_loop
async def test_a_client_that_does_not_read_stops_the_server_and_fills_no_memory() -> None:
    sent = [0]

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            writer.write(b"x" * 65_536)
            sent[0] += 65_536
            await writer.drain()

    async with server(handler) as port, relayed(port) as tap:
        _reader, writer = await asyncio.open_connection(LOCAL, tap.port, limit=1024)
        writer.write(b"GET /long HTTP/1.1\r\n\r\n")
        before = -1
        while sent[0] != before or not sent[0]:
            before = sent[0]
            await asyncio.sleep(0.3)
        waiting = sum(one.transport.get_write_buffer_size() for one in tap.relay.open if one.transport)
        assert 0 < waiting <= 2 * HIGH
        writer.close()


@on_a_loop
async def test_a_body_that_never_ends_passes_and_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MOST_OF_ONE", 1 << 20)
    came = [0]

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 20):
            came[0] += len(data)

    async with server(handler) as port, relayed(port) as tap:
        _reader, writer = await asyncio.open_connection(LOCAL, tap.port)
        writer.write(CHAT + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 65_536 + b"\r\n"
        for _ in range(160):
            writer.write(chunk)
            await writer.drain()
        await until(lambda: came[0] > 10 << 20)
        assert tap.relay.numbers.budget.held == 0
        reset(writer)
        await until(lambda: bool(tap.heard.asked_))
        assert tap.heard.asked_ == [(1, b"", True)]


@pytest.mark.parametrize("size", [10, 5 << 20])
@on_a_loop
async def test_while_no_server_is_there_requests_get_502_and_when_it_is_back_they_pass(size: int) -> None:
    async with server(answering(size)) as port:
        pass
    async with relayed(port) as tap:
        for _ in range(3):
            answer = await exchanged(tap.port, [asked(b"x" * size)], end=False)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert (
                head.startswith(b"HTTP/1.1 502 Bad Gateway")
                and f"127.0.0.1:{port}" in json.loads(body)["error"]["message"]
            )
        assert len(tap.said) == 1 and "502" in tap.said[0]
        async with server(answering(size), port):
            assert await exchanged(tap.port, [asked(b"x" * size)], end=False) == OK
            assert tap.said[1:] == [f"http://127.0.0.1:{port} answers"]


@on_a_loop
async def test_a_server_that_takes_no_connection_is_down_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "CONNECT_S", 0.2)

    # An address that is for documentation only: nothing answers, or the network says at once that it is not there.
    async with relayed(Target("http://192.0.2.1", "192.0.2.1", 9)) as tap:
        assert (await exchanged(tap.port, [asked(b"{}")], end=False)).startswith(b"HTTP/1.1 502")


@pytest.mark.full
@on_a_loop
async def test_a_thousand_connections_at_once() -> None:
    from kvtune.servers.tap.command import _more_files

    _more_files()
    waiting = asyncio.Event()
    came = [0]

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(100)
        came[0] += 1
        await waiting.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + body)
        await writer.drain()

    async def one(port: int, number: int) -> bool:
        body = b"%100d" % number
        return (await exchanged(port, [asked(body)], end=False)).endswith(body)

    async with server(handler) as port, relayed(port) as tap:
        tasks = [asyncio.create_task(one(tap.port, number)) for number in range(1000)]
        await until(lambda: came[0] == 1000, "all are open at once")
        waiting.set()
        assert all(await asyncio.gather(*tasks))
        assert len(tap.heard.answered_) == 1000 and tap.relay.numbers.budget.held == 0
        await until(lambda: not tap.relay.open, "all are closed")


@on_a_loop
async def test_a_tls_server_gets_its_own_host_and_else_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pem = str(Path(__file__).with_name("localhost.pem"))
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(pem)
    got: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            got.append(head + await reader.readexactly(2))
            writer.write(OK)

    async with server(handler, ssl=serving) as port:
        monkeypatch.setenv("SSL_CERT_FILE", pem)
        async with relayed(target_of(f"https://localhost:{port}"), session=False) as tap:
            reader, writer = await asyncio.open_connection(LOCAL, tap.port)
            for _ in range(2):
                writer.write(asked(b"{}"))
                assert await reader.readexactly(len(OK)) == OK
            writer.close()
            assert got == [asked(b"{}").replace(b"Host: a", b"Host: localhost:%d" % port)] * 2
        monkeypatch.delenv("SSL_CERT_FILE")
        async with relayed(target_of(f"https://localhost:{port}")) as tap:
            answer = await exchanged(tap.port, [asked(b"{}")], end=False)
            assert answer.startswith(b"HTTP/1.1 502") and b"certificate" in answer


def test_a_url_with_a_path_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="has a path"):
        target_of("http://127.0.0.1:8000/gateway")


@on_a_loop
async def test_a_sink_that_fails_does_not_touch_a_request() -> None:
    def fails(_: object) -> None:
        raise RuntimeError("of the analysis")

    for name in ("asked", "answered"):
        async with server(answering(2, times=3)) as port, relayed(port, numbers=Numbers(PREFIX)) as tap:
            setattr(tap.heard, name, fails)
            assert await exchanged(tap.port, [asked(b"{}")] * 3, end=False) == OK * 3
