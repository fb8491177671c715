"""Reads a stock server's KV events, and notices which batches it lost.

In: a server's answer to `/kv_event_sources`. Out: each data-parallel rank's batches in order. The reader runs in a
thread of the command, and sends the server only requests for a replay. Imports pyzmq and msgspec, no vLLM.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvtune.errors import KvtuneError

Hash = int | bytes
LARGEST_BATCH = 256 << 20
"""Largest message in bytes that the reader accepts: anyone who reaches its socket can send one."""
WAITING = 1_000_000
"""Most batches that wait for `Reader.take`. Beyond that the oldest is dropped."""
TRANSPORTS = ("tcp://", "ipc://")
"""Kinds of addresses that kvtune opens when a server names them. A source with any other address is left out."""
POLL_MS = 100
REPLAY_MS = 5_000
"""Longest wait for a replayed batch in milliseconds. A server that sends none within this time has no history."""
GATHER_S = 0.05
"""Seconds between two reads. A server sends a batch every step, and waking up for each would cost more CPU time."""
CONNECT_S = 1.0
"""Longest wait for the connections in seconds, before the reader asks for the history."""
END = (-1).to_bytes(8, "big", signed=True)


class Stored(msgspec.Struct, tag="BlockStored", tag_field="type", frozen=True, gc=False):
    """Blocks of a chain that a KV cache group now holds. If there are fewer hashes than blocks, some have no hash."""

    block_hashes: list[Hash]
    token_ids: list[int]
    block_size: int
    parent_block_hash: Hash | None = None
    lora_name: str | None = None
    medium: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type", frozen=True, gc=False):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", frozen=True, gc=False):
    pass


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """The events of one step. `ts` is the server's time.time() at the step's end."""

    ts: float
    events: list[Stored | Removed | Cleared]
    rank: int | None = None


DECODER = msgspec.msgpack.Decoder(Batch)


class Source(msgspec.Struct, frozen=True):
    """Where and how the server publishes one rank's events."""

    endpoint: str
    replay_endpoint: str | None = None
    publisher: str = "zmq"
    topic: str = ""
    enable_kv_cache_events: bool = True

    @property
    def server_binds(self) -> bool:
        """Whether vLLM binds the endpoint (wildcards, ipc, inproc). Else it connects, and the watcher must bind."""
        return (
            "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith(("ipc://", "inproc://"))
        )


def sources(answer: Mapping[str, Any]) -> dict[int, Source]:
    """Return the sources by rank, from the JSON of `/kv_event_sources`, without those that kvtune cannot read."""
    read = {}
    for rank, fields in answer.items():
        with contextlib.suppress(msgspec.ValidationError, ValueError):
            source = msgspec.convert(fields, Source)
            ends = (source.endpoint, source.replay_endpoint or source.endpoint)
            known = all(end.startswith(TRANSPORTS) for end in ends)
            if source.enable_kv_cache_events and source.publisher == "zmq" and known:
                read[int(rank)] = source
    return read


def reachable(endpoint: str, host: str) -> str:
    """Return the address of a server's endpoint for a client elsewhere: `tcp://*:5557` becomes `tcp://HOST:5557`."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    name, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if name in ("*", "0.0.0.0", "[::]", "::"):
        name = f"[{host}]" if ":" in host else host
    return f"tcp://{name}:{port}"


@dataclass(slots=True)
class Stream:
    """One rank's sequence of batches, and its gaps.

    `first`: the number of the first batch that was read; 0: nothing was missed. `lost`: batches in gaps that no replay
    filled. `restarts`: how often the server restarted. `unknown`: messages that this version of kvtune cannot read.
    """

    first: int | None = None
    last: int = -1
    at: float = 0.0
    """The newest batch's time, by the server's clock."""
    lost: int = 0
    restarts: int = 0
    unknown: int = 0
    connected: bool = False
    history: bool = False
    """Whether the server has sent all of its history."""

    @property
    def complete(self) -> bool:
        """Whether every batch since the server's start was read. Before any batch: whether the history was read."""
        begun = self.first == 0 or (self.first is None and self.history)
        return begun and not self.lost and not self.unknown


@dataclass(frozen=True, slots=True)
class Received:
    """A batch as it was read. `fresh`: the server was restarted before it, so its cache began empty."""

    rank: int
    batch: Batch
    fresh: bool = False


@dataclass
class Reader:
    """Reads all ranks' events in a thread, until `close`. `take` returns the new batches, in order for each rank."""

    sources: Mapping[int, Source]
    host: str
    streams: dict[int, Stream] = field(default_factory=dict)
    _waiting: deque[Received] = field(default_factory=lambda: deque(maxlen=WAITING))
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    problem: str = ""
    """The reason why the reader has stopped."""
    ready: threading.Event = field(default_factory=threading.Event)
    """Set when the history was read, or there is none."""

    def start(self) -> Reader:
        import zmq

        self._context = zmq.Context()
        self._subscribers: dict[Any, int] = {}
        self._monitors: dict[Any, int] = {}
        for rank, source in self.sources.items():
            socket = self._context.socket(zmq.SUB)
            self._subscribers[socket] = rank
            told = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            self._monitors[socket.get_monitor_socket(told)] = rank
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_BATCH)
            socket.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
            self.streams[rank] = Stream()
            try:
                if source.server_binds:
                    socket.connect(reachable(source.endpoint, self.host))
                else:
                    socket.bind(source.endpoint)
            except zmq.ZMQError as error:
                self.close()
                raise KvtuneError(*_refused(source, str(error))) from None
        self._thread = threading.Thread(target=self._run, name="kvtune-events", daemon=True)
        self._thread.start()
        return self

    def take(self) -> list[Received]:
        taken = []
        while self._waiting:
            taken.append(self._waiting.popleft())
        return taken

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for socket in self._subscribers:
            socket.disable_monitor()
        for socket in (*self._subscribers, *self._monitors):
            socket.close(linger=0)
        self._subscribers.clear()
        self._monitors.clear()
        self._context.term()

    def _run(self) -> None:
        import zmq

        poller = zmq.Poller()
        for socket in (*self._subscribers, *self._monitors):
            poller.register(socket, zmq.POLLIN)
        try:
            end = time.monotonic() + CONNECT_S
            while not all(stream.connected for stream in self.streams.values()) and time.monotonic() < end:
                self._poll(poller)
            # The sockets are subscribed already: no batch is lost between the replay's end and the first live batch.
            for rank in self.sources:
                self._replay(rank, 0, None)
            self.ready.set()
            while not self._stop.wait(GATHER_S):
                self._poll(poller)
        except zmq.ZMQError as error:
            self.problem = str(error)
        finally:
            self.ready.set()

    def _poll(self, poller: Any) -> None:
        import zmq
        from zmq.utils.monitor import recv_monitor_message

        for socket, _ in poller.poll(POLL_MS):
            if socket in self._monitors:
                event = recv_monitor_message(socket)["event"]
                self.streams[self._monitors[socket]].connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                continue
            for _ in range(1000):
                try:
                    _, number, payload = socket.recv_multipart(zmq.NOBLOCK)
                except (zmq.Again, ValueError):
                    break
                self._got(self._subscribers[socket], int.from_bytes(number, "big", signed=True), payload)

    def _got(self, rank: int, number: int, payload: bytes, *, replayed: bool = False) -> None:
        stream = self.streams[rank]
        try:
            batch = DECODER.decode(payload)
        except msgspec.MsgspecError:
            stream.unknown += 1
            stream.last = max(stream.last, number)
            return
        if number <= stream.last:
            # Either a batch that a replay has already brought, or a restarted server, whose numbers begin at 0 again.
            if replayed or batch.ts <= stream.at:
                return
            self._restarted(rank, number)
        elif not replayed and number > stream.last + 1:
            self._replay(rank, max(0, stream.last), number)
            if stream.last >= 0:
                stream.lost += max(0, number - stream.last - 1)
        fresh = stream.restarts > 0 and stream.last == -1
        if stream.first is None:
            stream.first = number
        stream.last, stream.at = number, batch.ts
        if len(self._waiting) == WAITING:  # the oldest is dropped
            stream.lost += 1
        self._waiting.append(Received(rank, batch, fresh))

    def _restarted(self, rank: int, number: int) -> None:
        stream = self.streams[rank]
        stream.restarts += 1
        stream.last, stream.first = -1, None
        if number > 0:
            self._replay(rank, 0, number)

    def _replay(self, rank: int, start: int, before: int | None) -> None:
        """Ask for the batches from number `start` to `before` (exclusive; None: all), if the server keeps a history.

        Batch `start` may have been read before: if the server's batch has another time, the server was restarted.
        """
        endpoint = self.sources[rank].replay_endpoint
        if not endpoint:
            return
        for number, payload in self._history(rank, reachable(endpoint, self.host), start):
            if before is not None and number >= before:
                break
            stream = self.streams[rank]
            if number == stream.last and _time_of(payload) not in (None, stream.at):
                self._restarted(rank, before or 0)
                return
            if stream.last >= 0 and number > stream.last + 1:
                stream.lost += number - stream.last - 1
            self._got(rank, number, payload, replayed=True)

    def _history(self, rank: int, endpoint: str, start: int) -> Iterator[tuple[int, bytes]]:
        import zmq

        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_BATCH)
            socket.connect(endpoint)
            socket.send_multipart([b"", start.to_bytes(8, "big")])
            waited = 0
            while waited < REPLAY_MS and not self._stop.is_set():
                if not socket.poll(POLL_MS):
                    waited += POLL_MS
                    continue
                waited = 0
                frames = socket.recv_multipart()
                if len(frames) != 4:
                    return
                if frames[2] == END:
                    self.streams[rank].history = True
                    return
                yield int.from_bytes(frames[2], "big"), frames[3]


def _time_of(payload: bytes) -> float | None:
    try:
        return DECODER.decode(payload).ts
    except msgspec.MsgspecError:
        return None


def unheard(source: Source, host: str) -> str:
    """Say why the reader may get no connection, and how to fix that."""
    where = source.endpoint
    if where.startswith("ipc://"):
        mend = "that is a file of the server's machine: run kvtune there, or give the server `tcp://*:5557`"
    elif source.server_binds:
        where = reachable(where, host)
        mend = "run kvtune where that port is reached: a proxy for HTTP does not carry events"
    else:
        mend = "the server connects to that address: run kvtune there"
    return f"nothing is heard of the server's KV events at {where}: {mend}"


def _refused(source: Source, why: str) -> tuple[str, str]:
    verb = "connect to" if source.server_binds else "listen at"
    hint = (
        "check that this machine reaches the server's event port"
        if source.server_binds
        else "the server connects to one watcher, at this address: stop the other one, or run kvtune where it points"
    )
    return f"cannot {verb} {source.endpoint}, where the server publishes its KV events: {why}", hint


def host_of(url: str) -> str:
    return urlsplit(url).hostname or "localhost"
