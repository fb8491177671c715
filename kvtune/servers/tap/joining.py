"""Hands a server's KV events to the judge of requests while these run, as a thread reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtune.base.bounded import cpu_limit
from kvtune.base.errors import KvtuneError, reason
from kvtune.servers.watch.cache import BYTES_CPU_S, LOOK_CPU_S, MOST_HELD_BYTES
from kvtune.servers.watch.endpoints import Named, host_of
from kvtune.servers.watch.events import Reader, Received
from kvtune.servers.watch.requests import Requests
from kvtune.servers.watch.server import Server

LATE_S = 0.3
"""Seconds after an answer's end in which the events of its prompt still come."""
HEARD_S = 5.0
"""Seconds after which it is said from where no events are heard."""


@dataclass
class Joining:
    """`say` gets a line about why events are not read.

    A request is joined only if they were heard when it was sent, and nothing was `lost` from then until its end.
    """

    say: Callable[[str], None]
    _reader: Reader | None = None
    _begun: float = 0.0
    _noted: bool = False

    def listen(self, server: Server, named: Named) -> None:
        """Read a server's events from now on, if it publishes any."""
        self.close()
        self._begun, self._noted = time.monotonic(), False
        try:
            if sources := server.event_sources():
                self._reader = Reader(sources, host_of(server.base), named).start()
        except KvtuneError as error:
            self.say(f"KV events are not read: {error.message}")

    @property
    def on(self) -> bool:
        return self._reader is not None and not self._reader.problem

    @property
    def heard(self) -> bool:
        """Whether what the server publishes now will come."""
        reader = self._reader
        if reader is None or reader.problem or not reader.ready.is_set():
            return False
        return all(stream.connected for stream in reader.streams.values())

    @property
    def lost(self) -> tuple[float, int] | None:
        """When reading began, and the batches since that did not come, or could not be read; None: it has ended."""
        if self._reader is None or self._reader.problem:
            return None
        return self._begun, sum(stream.lost + stream.unknown for stream in self._reader.streams.values())

    def take(self) -> list[Received]:
        """Return the batches that have come. Requests that were sent before now must be opened before `add`."""
        return self._reader.take() if self._reader is not None else []

    def add(self, batches: Sequence[Received], requests: Requests) -> None:
        reader = self._reader
        if reader is None:
            return
        if not self._noted and time.monotonic() > self._begun + HEARD_S:
            self._noted = True
            for note in reader.notes():  # what of its addresses is not opened, and where nothing is heard
                self.say(note)
        if len(reader.sources) > 1:
            batches = sorted(batches, key=lambda received: received.batch.ts)
        cache = requests.cache
        assert cache is not None
        cache.complete = all(stream.complete for stream in reader.streams.values())
        try:
            with cpu_limit(LOOK_CPU_S + sum(received.size for received in batches) / BYTES_CPU_S):
                for received in batches:
                    requests.add(received)
        except Exception as error:  # the account is no longer right; the answers' own counts are
            reader.stop(f"kvtune cannot count them: {reason(error)}")
        if cache.held_bytes > MOST_HELD_BYTES:
            reader.stop("they say that more blocks are cached than kvtune keeps in memory")
        if reader.problem:
            self.say(f"KV events are no longer read: {reader.problem}")
            self.close()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
