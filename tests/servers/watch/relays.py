"""A TCP relay before a real server's KV events, which a test can hold up or cut."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import httpx

from tests.servers.watch.played import Answers


class Relay:
    """Listens at `port` and passes bytes on, both ways, to another port of this machine.

    `held`: nothing passes, though the connections stay. `cut`: there are no connections.
    """

    def __init__(self, to: int) -> None:
        self.to, self.held, self.cut = to, False, False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                if self.cut:
                    near.close()
                    continue
                far = socket.create_connection(("127.0.0.1", self.to))
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                while self.held:
                    time.sleep(0.01)
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def break_off(self) -> None:
        self.cut = True
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.break_off()
        self.held = False
        self._listener.close()
        for end in self._sockets:
            end.close()


@contextmanager
def relayed(base: str) -> Iterator[tuple[Answers, list[Relay]]]:
    """What a server says, with the addresses of relays in place of its own, for `http`; and the relays."""
    answers = Answers("")
    with httpx.Client(base_url=base, timeout=30) as client:
        found = client.get("/kv_event_sources").json()["0"]
        ends = ("endpoint", "replay_endpoint")
        relays = [Relay(int(found[end].rpartition(":")[2])) for end in ends]
        for end, relay in zip(ends, relays, strict=True):
            found[end] = f"tcp://*:{relay.port}"
        answers.paths["/metrics"] = (200, lambda _: client.get("/metrics").text)
        answers.paths["/version"] = (200, client.get("/version").text)
        answers.paths["/v1/models"] = (200, client.get("/v1/models").text)
        answers.paths["/kv_event_sources"] = (200, json.dumps({"0": found}))
        try:
            yield answers, relays
        finally:
            for relay in relays:
                relay.close()
