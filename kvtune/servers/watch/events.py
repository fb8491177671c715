"""Reads a stock server's KV events, and notices which batches it lost.

In: a server's answer to `/kv_event_sources`. Out: each data-parallel rank's batches in order. The reader runs in a
thread of the command, and sends the server only requests for a replay. Imports pyzmq and msgspec, no vLLM.

Whoever reaches the port can send anything, so every number is checked where a message is read (`decoded`), and what
waits is bounded. What ends the thread is its `problem`.
"""

from __future__ import annotations

import sys
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b
from typing import Annotated, Any

import msgspec
import zmq
from msgspec import Meta
from zmq.utils.monitor import recv_monitor_message

from kvtune.base.bounded import BeyondError, msgpack_decoder
from kvtune.base.errors import KvtuneError, reason
from kvtune.servers.watch.endpoints import MOST_RANKS, Named, Source, Way, unheard, way

Hash = int | Annotated[bytes, Meta(max_length=64)]
LONGEST = 1024
"""Longest name of an adapter that is read, and part of a session's id. vLLM refuses a salt that is longer."""
Keys = Sequence[Any] | None
"""The keys of a block: adapter, images (each with where it begins in the block), salt, the digest of embeddings."""
GPU = "GPU"
"""The medium of the pool's events; others are of tiers below it."""
TRIED = ("0.29", "0.30", "0.31", "0.32", "0.33")
"""Versions of vLLM whose events were read from real servers, and each request's hit was as the server reported it."""
LARGEST_BATCH = 8 << 20
"""Largest message in bytes that the reader accepts. A step of 64,000 tokens in ten groups has 4 MB."""
MOST_EVENTS = 50_000
"""Most events of a batch."""
MOST_BLOCKS, BATCH_BYTES = 1 << 18, 64 << 20
"""Most blocks of a batch, and memory. A step of 64,000 tokens in blocks of one token stores and removes 2^17."""
MOST_ROOTS, MOST_RESETS, MOST_MEDIA = 8_192, 1_000, 8
"""Most prompts that begin in a batch (`max_num_seqs`), resets, and media: GPU, CPU, STORAGE, a connector's own."""
KEYS_BYTES = 1 << 16
"""Most bytes of a block's keys, packed. Clients name their images: beyond that a digest stands for the keys."""
BEYOND = (
    f"a step of vLLM has at most {MOST_BLOCKS:,} blocks in {BATCH_BYTES >> 20} MiB, {MOST_ROOTS:,} beginnings, "
    f"{MOST_RESETS:,} resets and {MOST_MEDIA} media"
)
MOST_NUMBER = 1 << 48
"""Largest number of a batch that is believed."""
HELD_BYTES = 64 << 20
"""Most memory of the batches that wait for `Reader.take`: beyond that the reader reads no further."""
HEARD_BYTES = 32 << 20
"""Most bytes of live messages that wait for a replay. Beyond that the oldest is dropped, and asked for again."""
HEARD = 8
"""Most messages that a socket keeps; the server's socket keeps those beyond."""
POLL_MS = 100
REPLAY_MS = 5_000
"""Longest wait for the first replayed batch in milliseconds. A server that sends none in this time has no history."""
AGAIN_MS = 1_000
"""Longest wait for a further batch, before the reader asks again: vLLM's socket drops what exceeds 1,000 messages."""
FILL_S = 120.0
"""Longest time in seconds for a replay."""
GATHER_S = 0.05
"""Seconds between two reads. A server sends a batch every step, and waking up for each would cost more CPU time."""
CONNECT_S = 1.0
"""Longest wait for the connections in seconds, before the reader asks for the history."""
Medium = Annotated[str, Meta(max_length=100)]
GroupIndex = Annotated[int, Meta(ge=0, lt=256)]
END = (-1).to_bytes(8, "big", signed=True)


class Stored(msgspec.Struct, tag="BlockStored", tag_field="type", frozen=True, gc=False):
    """Blocks of a chain that a KV cache group now holds. If there are fewer hashes than blocks, some have no hash."""

    block_hashes: Annotated[list[Hash], Meta(max_length=MOST_BLOCKS)]
    token_ids: Annotated[Sequence[Annotated[int, Meta(ge=0, lt=1 << 32)]], Meta(max_length=1 << 21)]
    block_size: Annotated[int, Meta(ge=0, le=1 << 20)]
    """0 in events of a tier that do not describe their blocks."""
    parent_block_hash: Hash | None = None
    lora_name: Annotated[str, Meta(max_length=LONGEST)] | None = None
    medium: Medium | None = None
    extra_keys: Sequence[Keys] | None = None
    group_idx: GroupIndex | None = None
    kv_cache_spec_kind: Annotated[str, Meta(max_length=100)] | None = None
    kv_cache_spec_sliding_window: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    session_id: str | None = None
    """The id of the request that computed the blocks: the client's, or a tap's."""


class Packed(Stored, tag="BlockStored", tag_field="type", frozen=True, gc=False):
    """An event as it is read: its keys are still packed."""

    extra_keys: Annotated[list[msgspec.Raw], Meta(max_length=MOST_BLOCKS)] | None = None

    def unpack(self) -> int:
        """Unpack its keys. Return about the memory that it takes beside its hashes."""
        rows = None if self.extra_keys is None else [_keys(row) for row in self.extra_keys]
        msgspec.structs.force_setattr(self, "extra_keys", rows)
        msgspec.structs.force_setattr(self, "session_id", (self.session_id or "")[:LONGEST])
        # Four bytes a token: a list of numbers takes ten times as much.
        msgspec.structs.force_setattr(self, "token_ids", array("I", self.token_ids))
        texts = [key[0] if isinstance(key, list) else key for row in rows or () for key in row or ()]
        names = [self.lora_name, self.session_id, *texts]
        return (
            4 * len(self.token_ids) + 8 * len(rows or ()) + sum(150 + sys.getsizeof(name) for name in names)
        )


class Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type", frozen=True, gc=False):
    block_hashes: Annotated[list[Hash], Meta(max_length=MOST_BLOCKS)]
    medium: Medium | None = None
    group_idx: GroupIndex | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", frozen=True, gc=False):
    pass


class Batch(msgspec.Struct, array_like=True, frozen=True):
    """The events of one step. `ts` is the server's time.time() at the step's end."""

    ts: Annotated[float, Meta(ge=0, le=1e11)]
    events: Annotated[list[Stored | Removed | Cleared], Meta(max_length=MOST_EVENTS)]
    rank: int | None = None


class Head(msgspec.Struct, array_like=True, frozen=True):
    """A batch whose events are still packed."""

    ts: Annotated[float, Meta(ge=0, le=1e11)]
    events: Annotated[list[msgspec.Raw], Meta(max_length=MOST_EVENTS)]
    rank: int | None = None


_head, _event = msgpack_decoder(Head), msgpack_decoder(Packed | Removed | Cleared)
_row = msgpack_decoder(tuple[Any, ...] | None)


def _keys(packed: msgspec.Raw) -> Keys:
    if len(packed) > KEYS_BYTES:
        return ([blake2b(packed).hexdigest(), 0],)
    keys: Keys = _row(packed)
    for key in keys or ():
        if not isinstance(key, str | bytes | int) and [*map(type, key or ())] != [str, int]:
            raise ValueError("a key of another kind")
    return keys


def decoded(payload: bytes) -> Batch:
    """Return the batch. ValueError if it is in another format, or has what no server of vLLM sends."""
    return measured(payload)[0]


def measured(payload: bytes) -> tuple[Batch, int]:
    """Return the batch, and about how much memory it takes. One event is built after the other, within the limits."""
    head = _head(payload)
    if head.ts != head.ts:
        raise ValueError("its time is NaN")
    events: list[Stored | Removed | Cleared] = []
    space = blocks = resets = 0
    media: set[str | None] = set()
    roots: Counter[int | None] = Counter()
    for packed in head.events:
        event: Stored | Removed | Cleared = _event(packed)
        events.append(event)
        if isinstance(event, Cleared):
            resets += 1
            continue
        media.add(event.medium)
        blocks, space = blocks + len(event.block_hashes), space + 300 + 80 * len(event.block_hashes)
        if isinstance(event, Packed):
            if not event.block_size and event.medium in (None, GPU):
                raise ValueError("blocks of no token")
            space += event.unpack()
            roots[event.group_idx] += event.parent_block_hash is None and event.medium in (None, GPU)
        if space > BATCH_BYTES or blocks > MOST_BLOCKS:
            raise BeyondError(BEYOND)
    if resets > MOST_RESETS or len(media) > MOST_MEDIA or max(roots.values(), default=0) > MOST_ROOTS:
        raise BeyondError(BEYOND)
    return Batch(head.ts, events, head.rank), space


@dataclass(slots=True)
class Stream:
    """One rank's sequence of batches, and its gaps.

    `first`: the number of the first batch that was read; 0: nothing was missed. `lost`: batches in gaps that no replay
    filled. `restarts`: how often the server restarted. `unknown`: messages that this version of kvtune cannot read;
    `unread`: why not, of the first. `gaps`: how often live batches were missing, in all `missing` batches, whether a
    replay had them or not. `dropped`: live batches for which kvtune itself had no room.
    """

    first: int | None = None
    last: int = -1
    at: float = 0.0
    """The newest batch's time, by the server's clock."""
    lost: int = 0
    restarts: int = 0
    unknown: int = 0
    unread: str = ""
    gaps: int = 0
    missing: int = 0
    dropped: int = 0
    connected: bool = False
    ended: tuple[int, int] = (0, 0)
    """`lost`, `unknown` when the server last restarted, with an empty cache: they tell nothing of its new life."""
    history: bool = False
    """Whether all batches up to now have come: a replay came to its end, or a live batch followed without a gap."""

    @property
    def unbroken(self) -> bool:
        """Whether nothing is missing from the server's start up to the last batch that was read."""
        return self.first in (0, None) and (self.lost, self.unknown) == self.ended

    @property
    def complete(self) -> bool:
        """Whether every batch since the server's start was read."""
        return self.unbroken and self.history

    def anew(self) -> None:
        self.restarts += 1
        self.last, self.first, self.ended = -1, None, (self.lost, self.unknown)

    def misread(self, why: str) -> None:
        self.unknown += 1
        self.unread = self.unread or why

    def missed(self, number: int) -> None:
        """Count the batches that are missing before batch `number`, if any was read before."""
        if self.last >= 0:
            self.lost += max(0, number - self.last - 1)


@dataclass(frozen=True, slots=True)
class Received:
    """A batch as it was read. `fresh`: the server was restarted before it, so its cache began empty.

    `size`: about the memory that it takes. `came`: when it came, by time.time(); 0: a replay brought it.
    """

    rank: int
    batch: Batch
    fresh: bool = False
    size: int = 0
    number: int = -1
    came: float = 0.0


class Asked(Enum):
    """How an answer to a replay's question ended."""

    END = auto()
    GAP = auto()
    """Batches are missing, or the end: the socket drops what it cannot hold."""
    SILENT = auto()
    RESTARTED = auto()


@dataclass
class Reader:
    """Reads all ranks' events in a thread, until `close`. `take` returns the new batches, in order for each rank."""

    sources: Mapping[int, Source]
    host: str
    named: Named = field(default_factory=Named)
    streams: dict[int, Stream] = field(default_factory=dict)
    problem: str = ""
    """The reason why the reader has stopped."""
    ready: threading.Event = field(default_factory=threading.Event)
    """Set when the history was read, or there is none."""
    _waiting: deque[Received] = field(default_factory=deque)
    _held: int = 0
    """Memory of the batches in `_waiting`."""
    _heard: deque[tuple[int, int, bytes, float]] = field(default_factory=deque)
    """Live messages that are still to be read: rank, number, payload, when they came."""
    _heard_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> Reader:
        self._context = zmq.Context()
        self._subscribers: dict[Any, int] = {}
        self._monitors: dict[Any, int] = {}
        self._ways: dict[int, Way] = {}
        self.streams |= {rank: Stream() for rank in self.sources}
        if len(self.sources) > MOST_RANKS:
            return self._ended(f"the server names {len(self.sources):,} ranks, and kvtune reads {MOST_RANKS}")
        self._ways = {r: way(r, source, self.host, self.named) for r, source in self.sources.items()}
        for rank, chosen in self._ways.items():
            if not chosen.connect and not chosen.bind:
                continue
            try:
                self._subscribe(rank, chosen)
            except zmq.ZMQError as error:
                if not chosen.bind:
                    return self._ended(f"{chosen.connect}: {error}")
                self.close()
                raise KvtuneError(
                    f"kvtune cannot listen at {chosen.bind}: {error}",
                    "the server sends its events to one watcher: stop the other one, or give another --listen",
                ) from None
        if self._subscribers:
            self._thread = threading.Thread(target=self._run, name="kvtune-events", daemon=True)
            self._thread.start()
        else:
            self.ready.set()
        return self

    def _subscribe(self, rank: int, chosen: Way) -> None:
        socket = self._socket(zmq.SUB)
        self._subscribers[socket] = rank
        kinds = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitors[socket.get_monitor_socket(kinds)] = rank
        socket.setsockopt(zmq.SUBSCRIBE, chosen.topic.encode(errors="replace"))
        if chosen.bind:
            socket.bind(chosen.bind)
        else:
            socket.connect(chosen.connect)

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, HEARD)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST_BATCH)
        socket.setsockopt(zmq.IPV6, 1)
        return socket

    def _ended(self, problem: str) -> Reader:
        self.problem = problem
        self.ready.set()
        return self

    def take(self) -> list[Received]:
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
            self._held = 0
        return taken

    def notes(self) -> list[str]:
        """Return, in words, which of the server's addresses were not opened, and from which nothing is heard."""
        notes = [note for chosen in self._ways.values() for note in chosen.notes]
        notes += [
            unheard(self.sources[rank], chosen)
            for rank, chosen in self._ways.items()
            if (chosen.connect or chosen.bind) and not self.streams[rank].connected
        ]
        return list(dict.fromkeys(notes))

    def stop(self, problem: str) -> None:
        """Read no further, because of `problem`."""
        self.problem = self.problem or problem
        self._stop.set()

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
        try:
            self._poller = zmq.Poller()
            for socket in (*self._subscribers, *self._monitors):
                self._poller.register(socket, zmq.POLLIN)
            end = time.monotonic() + CONNECT_S
            while not all(stream.connected for stream in self.streams.values()) and time.monotonic() < end:
                self._hear(POLL_MS)
            # The sockets are subscribed already: no batch is lost between the replay's end and the first live batch.
            for rank in self.sources:
                self._fill(rank, None)
            self.ready.set()
            while not self._stop.wait(GATHER_S):
                self._hear(POLL_MS)
                while self._heard and not self._stop.is_set():
                    rank, number, payload, came = self._heard.popleft()
                    self._heard_bytes -= len(payload)
                    self._got(rank, number, payload, came)
        except Exception as error:  # whatever it is: without the thread the account is no longer right
            self.problem = self.problem or f"the reader ended: {reason(error)}"
        finally:
            self.ready.set()

    def _hear(self, wait_ms: int) -> None:
        """Take what the sockets have: changes of connections, and live messages."""
        for socket, _ in self._poller.poll(wait_ms):
            if socket in self._monitors:
                event = recv_monitor_message(socket)["event"]
                self.streams[self._monitors[socket]].connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
                continue
            if (rank := self._subscribers.get(socket)) is None:  # a replay's
                continue
            for _ in range(1000):
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                self.hear(rank, frames)

    def hear(self, rank: int, frames: Sequence[bytes]) -> None:
        """Keep a live message. If there are too many, the oldest is dropped: its number is missing later."""
        number = _number(frames[1]) if len(frames) == 3 else -1
        if number < 0:
            self.streams[rank].misread("a message without a number")
            return
        self._heard.append((rank, number, frames[2], time.time()))
        self._heard_bytes += len(frames[2])
        while self._heard_bytes > HEARD_BYTES:
            first, _, dropped, _ = self._heard.popleft()
            self._heard_bytes -= len(dropped)
            self.streams[first].dropped += 1

    def _got(self, rank: int, number: int, payload: bytes, came: float) -> None:
        """Read a live message. If batches are missing before it, ask for them first."""
        stream = self.streams[rank]
        if number <= stream.last:
            # Either a batch that a replay has already brought, or a restarted server, whose numbers begin at 0 again.
            if (_time_of(payload) or 0.0) <= stream.at:
                return
            stream.anew()
        if number > stream.last + 1:
            if stream.last >= 0:
                stream.gaps += 1
                stream.missing += number - stream.last - 1
            self._fill(rank, number)
        if number <= stream.last:
            return
        stream.missed(number)
        self._accept(rank, number, payload, came)
        stream.history = True

    def _accept(self, rank: int, number: int, payload: bytes, came: float = 0.0) -> None:
        """Keep a batch for `take`, once there is room."""
        stream = self.streams[rank]
        fresh = stream.restarts > 0 and stream.last == -1
        stream.last = number
        if stream.first is None:
            stream.first = number
        try:
            batch, space = measured(payload)
        except ValueError as error:
            stream.misread(f"batch {number}: {reason(error)}")
            return
        stream.at = batch.ts
        while self._held > HELD_BYTES and not self._stop.is_set():
            self._hear(POLL_MS)
        with self._lock:
            self._waiting.append(Received(rank, batch, fresh, space, number, came))
            self._held += space

    def _fill(self, rank: int, before: int | None) -> None:
        """Ask for the batches that are missing before number `before` (None: for all), if the server keeps a history.

        vLLM's socket drops what exceeds 1,000 messages, the mark of the end, too: kvtune asks again from where it is.
        """
        stream, endpoint = self.streams[rank], self._ways[rank].replay
        if not endpoint:
            return
        if before is not None:
            stream.history = False
        end = time.monotonic() + FILL_S
        anew = False
        while time.monotonic() < end and not self._stop.is_set():
            last = stream.last
            ended = self._ask(rank, endpoint, before, end)
            if ended is Asked.RESTARTED and not anew:
                anew = True
                stream.anew()
            elif ended is Asked.END:
                stream.history = True
                return
            elif ended is not Asked.GAP or stream.last == last:
                return

    def _ask(self, rank: int, endpoint: str, before: int | None, end: float) -> Asked:
        """Ask once. Batch `last` is asked for again: if it has another time now, the server was restarted."""
        stream = self.streams[rank]
        start = max(0, stream.last)
        with self._socket(zmq.DEALER) as socket:
            socket.connect(endpoint)
            socket.send_multipart([b"", start.to_bytes(8, "big")])
            self._poller.register(socket, zmq.POLLIN)
            try:
                came, heard = False, time.monotonic()
                while not self._stop.is_set() and time.monotonic() < end:
                    if not socket.poll(0):
                        if time.monotonic() - heard > (AGAIN_MS if came else REPLAY_MS) / 1000:
                            return Asked.GAP if came else Asked.SILENT
                        self._hear(POLL_MS)
                        continue
                    ended = self.replayed(rank, socket.recv_multipart(), before, first=not came)
                    came, heard = True, time.monotonic()
                    if ended is not None:
                        return ended
            finally:
                self._poller.unregister(socket)
        return Asked.SILENT

    def replayed(
        self, rank: int, frames: Sequence[bytes], before: int | None, *, first: bool
    ) -> Asked | None:
        """Read one message of a replay. None: more is to come."""
        stream = self.streams[rank]
        if len(frames) == 4 and frames[2] == END:
            return Asked.END
        number = _number(frames[2]) if len(frames) == 4 else -1
        if number < 0:
            stream.misread("a message of a replay without a number")
            return Asked.SILENT
        if before is not None and number >= before:
            return Asked.END if stream.last == before - 1 or first else Asked.GAP
        if number == stream.last and _time_of(frames[3]) not in (None, stream.at):
            return Asked.RESTARTED
        if number <= stream.last:
            return None
        if number > stream.last + 1:
            if not first:
                return Asked.GAP
            stream.missed(number)
        self._accept(rank, number, frames[3])
        return None


def _number(frame: bytes) -> int:
    """Return a batch's number; -1 if it is none."""
    number = int.from_bytes(frame, "big") if len(frame) == 8 else -1
    return number if number < MOST_NUMBER else -1


def _time_of(payload: bytes) -> float | None:
    try:
        return float(_head(payload).ts)
    except ValueError:
        return None
