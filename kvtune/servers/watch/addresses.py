"""The addresses of several servers: from the command line, a file that is read again when it changes, names of DNS.

A line of the file is a URL, and after it the addresses of that server's KV events, if kvtune is to open others than
those of the server's own host. A name with several addresses is as many servers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.files import read_regular
from kvtune.servers.watch.client import base_of, lookup
from kvtune.servers.watch.endpoints import Named

MOST_BYTES = 1 << 20
MOST_SERVERS = 256


@dataclass
class Addresses:
    """`events`: as `URL=ADDRESS` if there are several servers. `read` returns each server's root URL."""

    urls: Sequence[str]
    file: Path | None = None
    events: Sequence[str] = ()
    lookup: Callable[[str, int], list[str]] = lookup
    listen: str = ""
    """Where one server's events are awaited, if it connects to them."""
    problem: str = ""
    """Why the servers could not be read again; they are those of before."""
    _known: dict[str, Named] = field(default_factory=dict)
    """The servers when they were last read."""
    _names: dict[str, list[str]] = field(default_factory=dict)
    """The addresses that each name last had: a name that is not found has these."""
    _written: tuple[int, int] = (0, 0)
    _lines: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def read(self) -> dict[str, Named]:
        """Return the servers now, each with what is allowed of its events. UsageError if they were never right."""
        try:
            self._known, self.problem = self._read(), ""
        except KvtuneError as error:
            if not self._known:
                raise
            self.problem = error.message
        return self._known

    def _read(self) -> dict[str, Named]:
        named = self._given() | {base: Named(events) for base, events in self._filed().items()}
        servers = {each: events for base, events in named.items() for each in self._expanded(base)}
        if len(servers) > MOST_SERVERS:
            raise UsageError(
                f"these are {len(servers)} servers, and kvtune watches {MOST_SERVERS}", "watch them in parts"
            )
        return servers

    @property
    def only(self) -> str:
        """The server, if there is one, and never will be several; else ""."""
        servers = self.read()
        return self.urls[0] if self.file is None and len(servers) == 1 else ""

    def _given(self) -> dict[str, Named]:
        bases = [base_of(url) for url in self.urls]
        if twice := next((base for base in bases if bases.count(base) > 1), None):
            raise UsageError(f"{twice} is named twice", "name each server once")
        if len(bases) == 1 and self.file is None:
            return {bases[0]: Named(self.events, self.listen)}
        given: dict[str, list[str]] = {base: [] for base in bases}
        for text in self.events:
            url, equals, address = text.rpartition("=")
            if not equals or base_of(url) not in given:
                raise UsageError(
                    f"--events {text!r} does not say of which server",
                    "give URL=ADDRESS, with a URL of the command",
                )
            given[base_of(url)].append(address)
        return {base: Named(events) for base, events in given.items()}

    def _filed(self) -> dict[str, tuple[str, ...]]:
        if self.file is None:
            return {}
        try:
            stat = self.file.stat()
            if (written := (stat.st_mtime_ns, stat.st_ino)) != self._written:
                self._lines = self._parsed(read_regular(self.file, MOST_BYTES).decode())
                self._written = written
        except (OSError, ValueError, KvtuneError) as error:
            why = error.message if isinstance(error, KvtuneError) else error
            raise UsageError(f"{self.file}: {why}", "give a file with a URL on each line") from None
        return self._lines

    def _parsed(self, text: str) -> dict[str, tuple[str, ...]]:
        servers: dict[str, tuple[str, ...]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            try:
                base, events = base_of(words[0]), tuple(words[1:])
                Named(events)
            except KvtuneError as error:
                raise UsageError(
                    f"line {number}: {error.message}", "give a URL, and its addresses of events"
                ) from None
            if base in servers:
                raise UsageError(f"line {number}: {base} is named twice", "name each server once")
            servers[base] = events
        return servers

    def _expanded(self, base: str) -> list[str]:
        parts = urlsplit(base)
        host = parts.hostname or ""
        if parts.scheme != "http":  # a certificate is of the name
            return [base]
        addresses = self.lookup(host, parts.port or 80) or self._names.get(host, [])
        self._names[host] = addresses
        if len(addresses) < 2:
            return [base]
        port = f":{parts.port}" if parts.port else ""
        return [
            f"http://{f'[{address}]' if ':' in address else address}{port}{parts.path}"
            for address in addresses
        ]
