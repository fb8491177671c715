"""Raw HTTP/1.1 on loopback for tests of the relay: servers that do as they are told, clients that send any pieces."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvtune.servers.tap.exchange import Connection, Exchange, Numbers
from kvtune.servers.tap.relay import Relay, Target

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
LOCAL = "127.0.0.1"
PREFIX = "kvtune-test-"


@dataclass
class Heard:
    """A sink that keeps copies: number, what was asked, what was answered, how it ended."""

    asked_: list[tuple[int, bytes, bool]] = field(default_factory=list)
    answered_: list[tuple[int, int, bytes, str]] = field(default_factory=list)

    def asked(self, exchange: Exchange) -> None:
        self.asked_.append((exchange.sent.number, b"".join(exchange.body.pieces), exchange.body.cut))

    def begun(self, exchange: Exchange) -> None: ...

    def answered(self, exchange: Exchange) -> None:
        ended = exchange.ended
        self.answered_.append((ended.number, ended.status, b"".join(exchange.answer.pieces), ended.how))


@dataclass
class Running:
    port: int
    heard: Heard
    relay: Relay
    said: list[str]


@asynccontextmanager
async def server(handler: Handler, port: int = 0, **options: Any) -> AsyncIterator[int]:
    running: set[asyncio.Task[None]] = set()

    async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await handler(reader, writer)
        finally:
            running.discard(task)
            writer.close()

    made = await asyncio.start_server(guarded, LOCAL, port, limit=1 << 20, **options)
    try:
        yield made.sockets[0].getsockname()[1]
    finally:
        made.close()
        for task in list(running):
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@asynccontextmanager
async def relayed(
    target: Target | int, *, session: bool = True, numbers: Numbers | None = None
) -> AsyncIterator[Running]:
    if isinstance(target, int):
        target = Target(f"http://{LOCAL}:{target}", LOCAL, target)
    heard, said = Heard(), list[str]()
    numbers = numbers or Numbers(PREFIX, session, target.host_field)
    relay = Relay(target, heard, numbers, said.append)
    listening = await relay.listen(LOCAL, 0)
    try:
        yield Running(listening.sockets[0].getsockname()[1], heard, relay, said)
    finally:
        listening.close()
        relay.cut()
        for _ in range(5):
            await asyncio.sleep(0)


async def exchanged(port: int, pieces: Sequence[bytes], *, end: bool = True) -> bytes:
    """Send the pieces, each on its own, then the end of bytes if `end`; return all that comes back."""
    reader, writer = await asyncio.open_connection(LOCAL, port)
    try:

        async def send() -> None:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                if len(pieces) > 1:
                    await asyncio.sleep(0)
            if end:
                writer.write_eof()

        sending = asyncio.create_task(send())
        back = bytearray()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                back += data
        with contextlib.suppress(ConnectionError):
            await sending
        return bytes(back)
    finally:
        writer.close()


def reset(writer: asyncio.StreamWriter) -> None:
    """Break the connection off, as a process that is killed does."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


async def until(holds: Callable[[], bool], what: str = "it holds") -> None:
    """Wait until something holds; a test that waits too long fails by its time limit."""
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"never: {what}")


def connection(sink: Heard, **options: object) -> Connection:
    return Connection(sink, Numbers(PREFIX, **options))  # type: ignore[arg-type]
