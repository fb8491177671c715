"""Which server behind a router served a request: the one whose KV events have its session id. In the analyst's process.

A session id that the tap made is of one request. One that a client made tells by the events after the request was
sent, until `LATE_S` after its end. A request has no server where none or several tell, or where another one of its
session was under way, whose event it may be: nothing is guessed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import structs

from kvtune.base.errors import KvtuneError
from kvtune.servers.tap.joining import HEARD_S
from kvtune.servers.watch.addresses import Addresses
from kvtune.servers.watch.endpoints import Named, host_of, sources_named
from kvtune.servers.watch.events import Reader, Received, Stored
from kvtune.servers.watch.server import Server

REREAD_S = 10.0
"""Seconds between two looks at the servers: new ones, and those whose events are not read."""
NO_SESSION = "have no session id"
NO_EVENT = "stored no block, or its event was lost"
SHARED = "were sent beside another of their session"
SEVERAL = "have a session id of several servers"


@dataclass(slots=True)
class Asked:
    """A request under way, sent at `began`. `ours`: its session id is the tap's, and of no other request.

    `alone`: no other of its session is under way. `servers`: whose events named it.
    """

    session: str
    began: float
    ours: bool
    alone: bool = True
    servers: set[str] = field(default_factory=set)


class Replicas:
    """`say` gets a line about servers whose events are not read. In order of time: `open`, `add`, `close`."""

    def __init__(
        self, addresses: Addresses, headers: Mapping[str, str], insecure: bool, say: Callable[[str], None]
    ) -> None:
        self._addresses, self._headers, self._insecure, self._say = addresses, headers, insecure, say
        self._asked: dict[str, list[Asked]] = {}
        self._readers: dict[str, Reader] = {}
        self._noted: set[str] = set()
        self.counts: Counter[str] = Counter()
        """Requests by why no server is known of them; "": it is known."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="kvtune-replicas", daemon=True)
        self._thread.start()

    def open(self, session: str, began: float, *, ours: bool) -> Asked:
        asked = Asked(session, began, ours)
        others = self._asked.setdefault(session, [])
        for other in others:
            other.alone = asked.alone = False
        others.append(asked)
        return asked

    def close(self, asked: Asked, *, counts: bool) -> str:
        """Return the server that served it; "" if that is not known. `counts`: whether the summary counts it."""
        others = self._asked[asked.session]
        others[:] = [other for other in others if other is not asked]
        if not others:
            del self._asked[asked.session]
        why = NO_SESSION if not asked.session else SHARED if not asked.alone else ""
        why = why or (SEVERAL if len(asked.servers) > 1 else "" if asked.servers else NO_EVENT)
        self.counts[why] += counts
        return "" if why else next(iter(asked.servers))

    def take(self) -> list[tuple[str, Received]]:
        """Return the batches that have come. Requests that were sent before now must be opened before `add`."""
        return [(url, got) for url, reader in [*self._readers.items()] for got in reader.take()]

    def add(self, came: Iterable[tuple[str, Received]]) -> None:
        for url, received in came:
            names = {event.session_id for event in received.batch.events if isinstance(event, Stored)}
            for asked in (asked for name in names for asked in self._asked.get(name or "", ())):
                if asked.ours or min(received.came, received.batch.ts) >= asked.began:
                    asked.servers.add(url)

    @property
    def summary(self) -> str:
        """How many requests have a server, and why others have none; "" without requests."""
        missing = [f"; {count:,} {why}" for why, count in self.counts.most_common() if why and count]
        left = f"{''.join(missing)} (replayed: -w requests:path=LOG,routed=1)" if missing else ""
        total = self.counts.total()
        return f"the server is known of {self.counts['']:,} of {total:,} requests{left}" if total else ""

    def _follow(self) -> None:
        """Read the events of servers as they come and go, without their history."""
        while not self._stop.is_set():
            try:
                named = self._addresses.read()
            except KvtuneError as error:
                self._note(error.message)
                named = {}
            if self._addresses.problem:
                self._note(self._addresses.problem)
            for url in [url for url, reader in self._readers.items() if url not in named or reader.problem]:
                reader = self._readers.pop(url)
                reader.close()
                self._note(
                    f"{url}: KV events are no longer read: {reader.problem or 'it is no longer named'}"
                )
            for url in [url for url in named if url not in self._readers]:
                self._begin(url, named[url])
            self._stop.wait(HEARD_S)
            for url, reader in self._readers.items():
                for note in reader.notes():
                    self._note(f"{url}: {note}")
            self._stop.wait(REREAD_S - HEARD_S)

    def _begin(self, url: str, named: Named) -> None:
        server = Server(url, self._headers, self._insecure)
        try:
            ranks = server.event_sources() or sources_named(named)
            live = {rank: structs.replace(source, replay_endpoint=None) for rank, source in ranks.items()}
            if live:
                self._readers[url] = Reader(live, host_of(url), named).start()
            else:
                self._note(f"{url} does not answer, or publishes no KV events: its requests name no replica")
        except KvtuneError as error:
            self._note(f"{url}: {error.message}")
        finally:
            server.close()

    def _note(self, line: str) -> None:
        if line not in self._noted:
            self._noted.add(line)
            self._say(line)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(1.0)  # it may wait for a server that does not answer
        for reader in self._readers.values():
            reader.close()
