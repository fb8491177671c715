"""A server that plays a recording: real HTTP, real ZeroMQ sockets that speak as vLLM's publisher does, no vLLM."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import zmq

from kvtune.servers.watch.addresses import Addresses
from kvtune.servers.watch.endpoints import Source
from kvtune.servers.watch.record import Recording
from kvtune.servers.watch.server import Server
from kvtune.servers.watch.servers import Servers
from kvtune.servers.watch.snapshot import Snapshot
from kvtune.servers.watch.watched import Watched

HERE = "tcp://127.0.0.1:*"
"""A port of this machine that zmq chooses."""
END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """vLLM's side of the events: PUB binds, or connects; ROUTER answers with what it has sent so far."""

    def __init__(self, endpoint: str = HERE, replay: str = "", *, binds: bool = True) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that tells who subscribes
        self._pub.set_hwm(0)
        (self._pub.bind if binds else self._pub.connect)(endpoint)
        self.endpoint, self.replay = self._pub.last_endpoint.decode(), ""
        self._lock = threading.Lock()
        self.sent: list[tuple[int, bytes]] = []
        self.dropped: set[int] = set()
        """Numbers that are kept for a replay and not sent."""
        self.asked: list[int] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(replay,), daemon=True) if replay else None
        if self._thread is not None:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.set_hwm(0)
            self._router.bind(replay)
            self.replay = self._router.last_endpoint.decode()
            self._thread.start()

    def subscribed(self) -> None:
        """Wait for a subscriber: what is sent before goes to nobody."""
        self._pub.recv()

    def publish(self, payloads: Sequence[tuple[int, bytes]], *, remember: bool = True) -> None:
        for number, payload in payloads:
            with self._lock:
                if remember:
                    self.sent.append((number, payload))
            if number not in self.dropped:
                self._pub.send_multipart((b"", number.to_bytes(8, "big"), payload))

    def _serve(self, replay: str) -> None:
        while not self._stop.is_set():
            if not self._router.poll(20):
                continue
            client, _, start = self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.asked.append(first)
            with self._lock:
                kept = list(self.sent)
            for number, payload in kept:
                if number >= first:
                    self._router.send_multipart((client, b"", b"", number.to_bytes(8, "big"), payload))
            self._router.send_multipart((client, b"", b"", END, b""))

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._router.close(linger=0)
        self._pub.close(linger=0)
        self._context.term()


class Answers:
    """What the HTTP server says: by path a status and a body, which may be a function of the request's JSON."""

    def __init__(self, metrics: str) -> None:
        self.paths: dict[str, tuple[int, str | Callable[[Any], str]]] = {
            "/metrics": (200, metrics),
            "/version": (200, '{"version": "0.32.0"}'),
            "/kv_event_sources": (200, "{}"),
            "/v1/models": (200, '{"data": [{"id": "tiny", "max_model_len": 4096}]}'),
        }
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        self.key = ""


@contextmanager
def http(answers: Answers, certificate: Path | None = None) -> Iterator[str]:
    """The base URL of a server with these answers; TLS with this certificate and key in one file."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are two writes: 40 ms a request

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            answers.seen.append((self.command, self.path, dict(self.headers.items())))
            status, text = answers.paths.get(self.path, (404, '{"error": "not found"}'))
            if answers.key and self.headers.get("Authorization") != f"Bearer {answers.key}":
                status, text = 401, '{"error": "Unauthorized"}'
            raw = (text if isinstance(text, str) else text(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        do_GET = do_POST = _answer

        def log_message(self, *_: object) -> None:
            pass

    with running(Handler, certificate) as port:
        yield f"{'http' if certificate is None else 'https'}://127.0.0.1:{port}"


@contextmanager
def running(handler: type[BaseHTTPRequestHandler], certificate: Path | None = None) -> Iterator[int]:
    """The port of a server whose requests go to this handler."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def sources(endpoint: str, replay: str | None, **more: object) -> str:
    """What a server says where it binds: all addresses, though here it is only this machine's own."""
    endpoint, replay = (end and end.replace("127.0.0.1", "*") for end in (endpoint, replay))
    return json.dumps(
        {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": endpoint,
                "replay_endpoint": replay,
                "buffer_steps": 10_000,
                "topic": "",
                **more,
            }
        }
    )


def answers_of(publisher: Publisher, metrics: str = "") -> Answers:
    """The answers of a server that names this publisher."""
    answers = Answers(metrics)
    answers.paths["/kv_event_sources"] = (200, sources(publisher.endpoint, publisher.replay or None))
    return answers


def published(metrics: str = "", *, history: bool = True) -> tuple[Publisher, Answers]:
    publisher = Publisher(HERE, HERE if history else "")
    return publisher, answers_of(publisher, metrics)


@contextmanager
def started(answers: Answers, **how: Any) -> Iterator[Watched]:
    """A watch of a server with these answers, which has started."""
    with http(answers) as base:
        made = Watched(Server(base), **how)
        try:
            made.start()
            yield made
        finally:
            made.close()


def first_look(answers: Answers) -> Snapshot:
    with started(answers) as made:
        return made.look()


def alone(base: str, **how: Any) -> Servers:
    """A list of one server, not yet started."""
    return Servers(
        Addresses([base]), lambda url, named, others: Watched(Server(url), named, others, **how), False
    )


@contextmanager
def recorder(answers: Answers, *, ran_s: float = 0.0, **how: Any) -> Iterator[Recording]:
    """A recording of a server with these answers, which ran for `ran_s`; 0: it has not started."""
    with http(answers) as base:
        made = Recording(alone(base, keep=[], **how))
        try:
            if ran_s:
                made.run(ran_s, lambda _: True)
            yield made
        finally:
            made.servers.close()


@dataclass
class Stream:
    """What a reader says of its stream. `whole`: it has read the stream from its beginning."""

    first: int | None = 0
    last: int = 0
    lost: int = 0
    unknown: int = 0
    connected: bool = True
    whole: bool = True

    @property
    def unbroken(self) -> bool:
        return not self.lost

    @property
    def complete(self) -> bool:
        return self.whole and self.unbroken


class Unconnected:
    """A server and the reader of its events in one, without sockets. A subclass says what is scraped and taken."""

    base, host, problem = "http://played", "played", ""

    def __init__(self) -> None:
        self.sources = {0: Source("ipc:///played")}
        self.streams = {0: Stream()}
        self.ready = threading.Event()
        self.ready.set()

    def version(self) -> str:
        return "0.32.0"

    def longest(self) -> int:
        return 4096

    def event_sources(self) -> dict[int, Source]:
        return self.sources

    def notes(self) -> list[str]:
        return []

    def close(self) -> None: ...


def counters(queries: int, hits: int, *, started: float = 1.0, **more: Any) -> str:
    """A short /metrics of one engine."""
    return f"process_start_time_seconds {started}\n" + engine_counters(queries, hits, **more)


def engine_counters(
    queries: int,
    hits: int,
    *,
    running: int = 1,
    waiting: int = 0,
    output: int = 10,
    preempted: int = 0,
    done: int = 0,
    engine: int = 0,
    blocks: int = 200,
) -> str:
    """One engine's series; a server with several API servers has no other."""
    labels = f'{{engine="{engine}",model_name="tiny"}}'
    lines = [
        f"vllm:num_requests_running{labels} {running}.0",
        f"vllm:num_requests_waiting{labels} {waiting}.0",
        f"vllm:kv_cache_usage_perc{labels} 0.25",
        f"vllm:prefix_cache_queries_total{labels} {queries}.0",
        f"vllm:prefix_cache_hits_total{labels} {hits}.0",
        f"vllm:prompt_tokens_total{labels} {queries}.0",
        f"vllm:generation_tokens_total{labels} {output}.0",
        f"vllm:num_preemptions_total{labels} {preempted}.0",
        f'vllm:request_success_total{{engine="{engine}",finished_reason="stop",model_name="tiny"}} {done}.0',
        f'vllm:cache_config_info{{block_size="32",enable_prefix_caching="True",engine="{engine}",'
        f'num_gpu_blocks="{blocks}"}} 1.0',
    ]
    return "\n".join([*lines, ""])


def histogram(name: str, values: Sequence[float], bounds: Sequence[float] = ()) -> str:
    """One engine's histogram of these values, as vLLM publishes it."""
    labels = 'engine="0",model_name="tiny"'
    buckets = [(str(bound), sum(value <= bound for value in values)) for bound in bounds]
    lines = [
        f'vllm:{name}_bucket{{{labels},le="{bound}"}} {count}.0'
        for bound, count in (*buckets, ("+Inf", len(values)))
    ]
    sums = (f"vllm:{name}_count{{{labels}}} {len(values)}.0", f"vllm:{name}_sum{{{labels}}} {sum(values)}")
    return "\n".join([*lines, *sums, ""])


def until(holds: Callable[[], bool]) -> None:
    """Waits for something that other threads do; the test's own limit ends it."""
    while not holds():
        time.sleep(0.005)
