"""The relay: each client's connection has its own to the server, and bytes pass in both directions as they come.

Runs in the command's process, on asyncio's transports. A client's end of bytes is passed on as one, and a connection
that breaks on one side breaks on the other: the server cancels what nobody waits for. What is recorded goes to a
`Sink`, which never blocks. No request waits for anything of kvtune, and none fails because of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import resource
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

from kvtune.base.errors import KvtuneError, UsageError, reason
from kvtune.servers.tap.exchange import Connection, Numbers, Sink

HIGH = 256 << 10
"""Bytes that wait for one side before the other is read no further."""
CONNECT_S = 10.0
LINGER_S = 2.0
"""Seconds in which a client that is refused may still send its body, so that it reads the answer."""
BACKLOG = 1024
RESERVED = 32
"""Descriptors that are not for clients: files, the analyst, looking up a name."""
AGAIN_S = 1.0
"""Seconds until clients are accepted again after the system could not."""
_RESET = struct.pack("ii", 1, 0)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Target:
    """The server. `name`: what a person called it; `tls`: None for plain HTTP."""

    name: str
    host: str
    port: int
    tls: ssl.SSLContext | None = None

    @property
    def host_field(self) -> str:
        """The Host field that a TLS server needs; "": the client's stays."""
        if self.tls is None:
            return ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == 443 else f"{host}:{self.port}"


def target_of(base: str, insecure: bool = False) -> Target:
    """Return the server at a root URL (see `watch.client.base_of`)."""
    parts = urlsplit(base)
    if parts.path:
        raise UsageError(
            f"{base} has a path, and a tap relays a whole server", f"give {parts.scheme}://{parts.netloc}"
        )
    tls = None
    if parts.scheme == "https":
        tls = ssl.create_default_context()
        if insecure:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
    return Target(base, parts.hostname or "localhost", parts.port or (443 if tls else 80), tls)


@dataclass
class Relay:
    target: Target
    sink: Sink
    numbers: Numbers
    say: Say
    addresses: list[str] = field(default_factory=list)
    """The addresses of the server, as last resolved."""
    open: set[Side] = field(default_factory=set)
    down: bool = False

    async def listen(self, host: str, port: int) -> Listener:
        loop, sockets = asyncio.get_running_loop(), list[socket.socket]()
        try:
            for family, _, _, _, address in await loop.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                sockets.append(socket.create_server(address[:2], family=family, backlog=BACKLOG))
        except OSError as error:
            # Such as ::1 of localhost where there is no IPv6:
            if not sockets or error.errno != errno.EADDRNOTAVAIL:
                for listener in sockets:
                    listener.close()
                raise KvtuneError(
                    f"cannot listen at {host}:{port}: {error.strerror or error}",
                    "give another --listen ADDRESS:PORT",
                ) from None
        return Listener(self, sockets)

    async def knock(self) -> None:
        """Say whether no server is there."""
        try:
            (await self.dial(Connection(self.sink, self.numbers))).close()
        except OSError as error:
            self.heard(_why(error))

    async def dial(self, connection: Connection) -> Server:
        """Connect to the server. OSError if no address answers."""
        loop, target = asyncio.get_running_loop(), self.target
        if not self.addresses:
            addresses = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
            self.addresses = list(dict.fromkeys(str(info[4][0]) for info in addresses))
        wrong: OSError | None = None
        for address in list(self.addresses):
            name = target.host if target.tls else None
            try:
                async with asyncio.timeout(CONNECT_S):
                    _, side = await loop.create_connection(
                        lambda: Server(self, connection),
                        address,
                        target.port,
                        ssl=target.tls,
                        server_hostname=name,
                    )
            except OSError as error:  # TimeoutError is one, and so are those of TLS
                wrong = error
            else:
                self.addresses.sort(key=lambda other: other != address)  # the next connection begins with it
                return side
        self.addresses.clear()
        raise wrong or OSError("its name has no address")

    def heard(self, why: str = "") -> None:
        """Say that the server is there again, or no longer (`why`)."""
        name, down = self.target.name, bool(why)
        gone = f"no server answers at {name}: {why}; requests get 502 until it does"
        if down != self.down:
            self.say(gone if down else f"{name} answers")
        self.down = down

    def cut(self) -> None:
        """Break all connections, as the tap ends."""
        for side in list(self.open):
            side.connection.ended("tap")
            side.break_off()


class Listener:
    """Accepts clients, as many as descriptors allow. The others wait in the system's queue."""

    def __init__(self, relay: Relay, sockets: list[socket.socket]) -> None:
        self.sockets = sockets
        self._relay = relay
        self._most = max(1, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED) // 2)
        self._room = asyncio.Semaphore(self._most)
        self._said = False
        self._accepting = [asyncio.create_task(self._accept(each)) for each in sockets]
        self._clients: set[asyncio.Task[None]] = set()
        """A task a connection, until it is closed."""

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._wait(f"no more clients can be accepted: {reason(error)}")
                await asyncio.sleep(AGAIN_S)
                continue
            if self._room.locked():
                self._wait(f"{self._most} clients are connected, as many as descriptors allow (ulimit -n)")
            try:
                await self._room.acquire()
            except asyncio.CancelledError:
                accepted.close()
                raise
            task = loop.create_task(self._serve(accepted))
            self._clients.add(task)
            task.add_done_callback(self._clients.discard)

    def _wait(self, why: str) -> None:
        if not self._said:
            self._relay.say(f"{why}; further ones wait until one leaves")
        self._said = True

    async def _serve(self, accepted: socket.socket) -> None:
        client = Client(self._relay, Connection(self._relay.sink, self._relay.numbers))
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: client, accepted)
            await client.closed.wait()
        except OSError:
            accepted.close()
        finally:
            self._room.release()

    def close(self) -> None:
        for task, listening in zip(self._accepting, self.sockets, strict=True):
            task.cancel()
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"it did not answer within {CONNECT_S:.0f} s"
    return reason(error)


class Side(asyncio.Protocol):
    """One of the two connections: the client's or the server's."""

    name = ""
    transport: asyncio.Transport

    def __init__(self, relay: Relay, connection: Connection) -> None:
        self.relay = relay
        self.connection = connection
        self.other: Side | None = None
        self._early = bytearray()
        """What came for the other before it was joined; some loops read once more before they pause."""
        self.ended = False
        """Whether its end of bytes has come."""
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.set_write_buffer_limits(high=HIGH)
        self._option(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.relay.open.add(self)

    def _option(self, level: int, option: int, value: int | bytes) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.transport.get_extra_info("socket").setsockopt(level, option, value)

    def join(self, other: Side) -> None:
        self.other = other
        self.pass_on(bytes(self._early))
        self._early.clear()
        if self.ended:
            self.eof_received()

    def pass_on(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        elif data:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        self.ended = True
        self.connection.ended(self.name)
        other = self.other
        if other is None or other.gone:
            return True
        if other.ended:
            self.close()
            other.close()
        elif other.transport.can_write_eof():
            other.transport.write_eof()
        elif self.connection.waiting:  # TLS has no half-closed connections: who ends waits no longer
            other.break_off()
        else:
            other.close()
        return self.transport.can_write_eof()

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        self.relay.open.discard(self)
        self.connection.closed(self.name)
        if self.other is not None and not self.other.gone:
            if error is not None or not self.ended:
                self.other.break_off()
            else:
                self.other.close()

    def close(self) -> None:
        self.transport.close()

    def break_off(self) -> None:
        """Reset the connection after what was sent."""
        self._option(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.close()


class Client(Side):
    name = "client"

    def __init__(self, relay: Relay, connection: Connection) -> None:
        super().__init__(relay, connection)
        self._refused = False
        self.closed = asyncio.Event()
        self._held: asyncio.TimerHandle | None = None
        """Runs while the beginning of a head is held."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.transport.pause_reading()
        self._dialling = asyncio.get_running_loop().create_task(self._dial())

    async def _dial(self) -> None:
        try:
            server = await self.relay.dial(self.connection)
        except OSError as error:
            self._refuse(_why(error))
            return
        if self.gone:
            server.break_off()
            return
        self.relay.heard()
        server.join(self)
        self.join(server)
        self.transport.resume_reading()

    def _refuse(self, why: str) -> None:
        """Answer 502, and read on for a while: a client that still sends would not read the answer after a reset."""
        self.relay.heard(why)
        if self.gone:
            return
        self._refused = True
        message = f"kvtune: no server answers at {self.relay.target.name}: {why}"
        text = json.dumps({"error": {"message": message, "type": "bad_gateway", "code": 502}}).encode()
        self.transport.write(
            b"HTTP/1.1 502 Bad Gateway\r\ncontent-type: application/json\r\nconnection: close\r\n"
            b"content-length: %d\r\n\r\n" % len(text) + text
        )
        if self.ended or not self.transport.can_write_eof():
            self.close()
            return
        self.transport.write_eof()
        self.transport.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_S, self.close)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self.pass_on(self.connection.asking(data))
        if not self.connection.holding:
            self._stop_waiting()
        elif self._held is None:
            held_s = self.relay.numbers.held_s
            self._held = asyncio.get_running_loop().call_later(held_s, self.let_go)

    def let_go(self) -> None:
        """Pass on what a head that is not whole holds back."""
        self._stop_waiting()
        self.pass_on(self.connection.let_go())

    def _stop_waiting(self) -> None:
        if self._held is not None:
            self._held.cancel()
            self._held = None

    def eof_received(self) -> bool:
        if self._refused:
            self.close()
        else:
            self.let_go()
        return super().eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_waiting()
        self.closed.set()
        super().connection_lost(error)


class Server(Side):
    name = "server"

    def break_off(self) -> None:
        """Reset the connection at once: it computes for nobody."""
        super().break_off()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self.pass_on(data)
        self.connection.answering(data)
        if isinstance(self.other, Client):
            self.other.let_go()  # an answer may be to what is held
