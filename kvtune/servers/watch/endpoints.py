"""Which addresses of KV events kvtune opens: those of the server's own host, and what the user named. Pure.

The server says where it publishes (`/kv_event_sources`), and may say anything. So its host is not taken from its word:
a TCP port is reached at the host of the URL. An address with another host, or a file of this machine (`ipc://`), is
opened only if the user named it; and kvtune listens only at an address that the user named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvtune.base.commands import quoted
from kvtune.base.errors import UsageError
from kvtune.data.show.terminal import one_line

MOST_RANKS = 128
"""Most ranks whose events are read: each takes a few sockets."""
IPC, TCP = "ipc://", "tcp://"
"""Kinds of addresses that kvtune opens. A source with any other address is left out."""
Address = Annotated[str, Meta(max_length=300)]


class Source(msgspec.Struct, frozen=True):
    """Where and how the server publishes one rank's events, in its own words."""

    endpoint: Address
    replay_endpoint: Address | None = None
    publisher: str = "zmq"
    topic: Annotated[str, Meta(max_length=300)] = ""
    enable_kv_cache_events: bool = True

    @property
    def server_binds(self) -> bool:
        """Whether vLLM binds the endpoint (wildcards, ipc). Else it connects to it, and the watcher must listen."""
        return "*" in self.endpoint or "::" in self.endpoint or self.endpoint.startswith(IPC)


class NamedSource(Source, frozen=True):
    """A source that the user named: vLLM before 0.31 does not say where it publishes."""

    @property
    def server_binds(self) -> bool:
        return True


def sources_named(named: Named) -> dict[int, Source]:
    """Return the source that `--events ADDRESS` names, the replay's with a second one, of a server that names none."""
    if not named.events:
        return {}
    return {0: NamedSource(named.events[0], named.events[1] if len(named.events) > 1 else None)}


def sources(answer: Mapping[str, Any]) -> dict[int, Source]:
    """Return the sources by rank, from the JSON of `/kv_event_sources`, without those that kvtune cannot read."""
    read = {}
    for rank, fields in answer.items():
        with contextlib.suppress(ValueError):  # msgspec's errors, too
            source = msgspec.convert(fields, Source)
            ends = (source.endpoint, source.replay_endpoint or source.endpoint)
            usual = all(_is_known(end) for end in ends) and rank.isdecimal() and len(rank) < 5
            if source.enable_kv_cache_events and source.publisher == "zmq" and usual:
                read[int(rank)] = source
    return read


@dataclass(frozen=True)
class Named:
    """What the user allows beyond the server's own host. `events`: addresses to connect to; `listen`: one to bind."""

    events: Sequence[str] = ()
    listen: str = ""

    def __post_init__(self) -> None:
        for option, address in (*(("--events", event) for event in self.events), ("--listen", self.listen)):
            if address and not _is_known(address):
                raise UsageError(
                    f"{option} {address!r} is not the address of KV events",
                    "give tcp://HOST:PORT" + (", or ipc://FILE" if option == "--events" else ""),
                )
        if self.listen.startswith(IPC):
            raise UsageError(
                "--listen takes tcp://HOST:PORT", "a server binds an ipc:// file itself: --events"
            )


@dataclass(frozen=True, slots=True)
class Way:
    """How kvtune reaches one rank's events: it connects to, or binds. `notes`: what it does not open, and why."""

    topic: str = ""
    connect: str = ""
    bind: str = ""
    replay: str = ""
    notes: tuple[str, ...] = ()


def way(rank: int, source: Source, host: str, named: Named) -> Way:
    notes, connect, bind = [], "", ""
    if source.server_binds:
        connect = _opened(source.endpoint, host, named)
    elif named.listen:
        name, _, port = named.listen.rpartition(":")
        bind = f"{name}:{int(port) + rank}"
    else:
        notes.append(
            f"the server sends its KV events to {one_line(source.endpoint)} and kvtune listens only where you say: "
            "add `--listen tcp://ADDRESS:PORT` (whoever reaches that port can send events), or give the server "
            "`tcp://*:5557`"
        )
    replay = _opened(source.replay_endpoint, host, named) if source.replay_endpoint else ""
    endpoints = [source.endpoint] if source.server_binds and not connect else []
    endpoints += [source.replay_endpoint] if source.replay_endpoint and not replay else []
    if endpoints:
        option = quoted(word for address in endpoints for word in ("--events", address))
        notes.append(
            f"the server names {' and '.join(map(one_line, endpoints))}, which kvtune opens only if you name it, too: "
            f"add `{one_line(option)}` if it is right"
        )
    return Way(source.topic, connect, bind, replay, tuple(notes))


def _opened(endpoint: str, host: str, named: Named) -> str:
    """Return the address to connect to: `tcp://*:5557` becomes `tcp://HOST:5557`; empty: the user did not name it."""
    if endpoint in named.events:
        return endpoint
    if endpoint.startswith(IPC):
        return ""
    port = endpoint.rpartition(":")[2]
    return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"


def _is_known(address: str) -> bool:
    if not address.isprintable() or not address.isascii():
        return False
    if address.startswith(IPC):
        return len(address) > len(IPC)
    name, _, port = address.removeprefix(TCP).rpartition(":")
    return address.startswith(TCP) and bool(name) and port.isdecimal() and 0 < int(port[:6]) < 1 << 16


def unheard(source: Source, way: Way) -> str:
    """Say why no connection came, and how to fix that."""
    if way.bind:
        return (
            f"nothing is heard of the server's KV events at {way.bind}: the server connects to "
            f"{one_line(source.endpoint)}, which must lead there"
        )
    if way.connect.startswith(IPC):
        mend = "that is a file of the server's machine: run kvtune there, or give the server `tcp://*:5557`"
    else:
        mend = "run kvtune where that port is reached: a proxy for HTTP does not carry events"
    return f"nothing is heard of the server's KV events at {one_line(way.connect)}: {mend}"


def host_of(url: str) -> str:
    return urlsplit(url).hostname or "localhost"
