"""What `kvtune watch` takes for many busy servers: CPU, memory, and how late it counts what they publish.

`--servers` fake servers, in their own process, publish as vLLM does: `--requests` a second each, of `--tokens`
tokens. The share `--hit` of a prompt is a prefix that the server has; the rest is new text, and evicts as many blocks.
Their /metrics say the same. With `--restart S` each S seconds one of them is gone for a while and starts again. The
watcher is this process: of one server with as many ranks (`--as ranks`), or of a fleet (`--as servers`). Printed, each
10 s: the watcher's CPU in cores, its memory, and the seconds from a batch's own time until it was counted, of the
server that is latest.

With `--hour 20` no second passes between requests: all an hour's restarts (one a minute) and changes of addresses (a
server leaves each minute, and comes back a minute later), and a 20th of its requests, `--seconds` or not. What is kept
by the second (looks, the evictions of the last minute) is not compressed. Printed, each virtual minute: the memory, the
watcher's CPU a batch, and what its accounts hold.

    python -m bench.watched --seconds 60
    python -m bench.watched --hour 20
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from kvtune.servers.watch.addresses import Addresses
from kvtune.servers.watch.cache import rare_collections
from kvtune.servers.watch.server import Server
from kvtune.servers.watch.servers import Servers
from kvtune.servers.watch.watched import ASK_S, Watched
from tests.servers.watch.played import counters, engine_counters, sources

BLOCK = 16
PREFIXES = 50
AWAY_S = 5.0
PRINT_S = 10.0
LOOKS = 4
LOOK_S = 0.5
"""Seconds between two looks, as in the live view."""
ENCODER = msgspec.msgpack.Encoder()


@dataclass
class Fake:
    """A server. Its texts' hashes are of the fake `twin`: two servers have the same ones, as replicas do."""

    rank: int
    twin: int
    tokens: int
    hit: float
    pool: int
    publisher: Any
    number: int = 0
    count: int = 0
    started: float = 1.0
    back: float = 0.0
    queries: int = 0
    hits: int = 0
    held: list[tuple[int, int]] = field(default_factory=list)
    """Requests whose blocks it has, with their number of blocks, oldest first."""
    blocks: int = 0

    def __post_init__(self) -> None:
        self.shared = int(self.tokens * self.hit) // BLOCK
        self.own = self.tokens // BLOCK - self.shared
        draw = random.Random(self.twin)
        self.texts = [_text(draw, max(self.shared, self.own)) for _ in range(500)]

    def names(self, request: int, blocks: int) -> msgspec.Raw:
        first = (1 << 63) + (self.twin << 48) + (request << 10)
        packed = np.empty(blocks, dtype=[("kind", "u1"), ("name", ">u8")])
        packed["kind"], packed["name"] = 0xCF, np.arange(first, first + blocks, dtype=np.uint64)
        return msgspec.Raw(b"\xdc" + struct.pack(">H", blocks) + packed.tobytes())

    def stored(self, request: int, blocks: int, parent: int | None) -> dict[str, Any]:
        text = bytearray(self.texts[request % len(self.texts)][: 3 * BLOCK * blocks])
        text[1:3], text[4:6] = (
            struct.pack(">H", 256 + request % 65_000),
            struct.pack(">H", 256 + request // 65_000),
        )
        tokens = b"\xdc" + struct.pack(">H", BLOCK * blocks) + bytes(text)
        event = {
            "type": "BlockStored",
            "block_hashes": self.names(request, blocks),
            "parent_block_hash": parent,
        }
        more = {"block_size": BLOCK, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0}
        return event | {"token_ids": msgspec.Raw(tokens)} | more | {"kv_cache_spec_kind": "full_attention"}

    def send(self, events: list[dict[str, Any]]) -> None:
        payload = ENCODER.encode([time.time(), events, self.rank])
        self.publisher.send_multipart((b"", self.number.to_bytes(8, "big"), payload))
        self.number += 1

    def ask(self) -> None:
        """One request: its prefix, if the server does not have it yet, its own text, and what that evicts."""
        prefix, request = self.count % PREFIXES, PREFIXES + self.count
        events: list[dict[str, Any]] = []
        first = self.count < PREFIXES and self.shared > 0
        if first:
            events.append(self.stored(prefix, self.shared, None))
            self.blocks += self.shared
        while self.blocks + self.own > self.pool:
            gone, blocks = self.held.pop(0)
            name = (1 << 63) + (self.twin << 48) + (gone << 10)
            events += [
                {"type": "BlockRemoved", "block_hashes": [name + at], "medium": "GPU", "group_idx": 0}
                for at in range(blocks)
            ]
            self.blocks -= blocks
        parent = (1 << 63) + (self.twin << 48) + (prefix << 10) + self.shared - 1 if self.shared else None
        events.append(self.stored(request, self.own, parent))
        self.held.append((request, self.own))
        self.blocks += self.own
        self.count += 1
        self.queries += self.tokens
        self.hits += 0 if first else BLOCK * self.shared
        self.send(events)

    def anew(self) -> None:
        self.number = self.count = self.queries = self.hits = self.blocks = 0
        self.held.clear()
        self.started += 1000.0


def _text(draw: random.Random, blocks: int) -> bytes:
    """Token ids of three bytes each, as msgpack has them."""
    return b"".join(b"\xcd" + struct.pack(">H", 256 + draw.randrange(60_000)) for _ in range(BLOCK * blocks))


def publish(given: argparse.Namespace) -> None:
    context = zmq.Context()
    fakes, ports = [], []
    first = _ports(given.servers)
    for rank in range(given.servers):
        publisher = context.socket(zmq.PUB)
        publisher.set_hwm(100_000)
        publisher.bind(f"tcp://127.0.0.1:{first + rank}")
        ports.append(first + rank)
        fakes.append(Fake(rank, rank // 2, given.tokens, given.hit, given.pool, publisher))
    pool = given.pool + 1

    def answer(path: str) -> str:
        name, _, of = path.removeprefix("/").partition("/")
        if name != "all":
            fake = fakes[int(name)]
            if fake.back > time.monotonic():
                return ""
            if of == "metrics":
                return counters(fake.queries, fake.hits, done=fake.count, started=fake.started).replace(
                    '"200"', f'"{pool}"'
                )
            return sources(f"tcp://127.0.0.1:{ports[fake.rank]}", None) if of == "kv_event_sources" else "{}"
        if of == "metrics":
            each = [
                engine_counters(
                    fake.queries, fake.hits, done=fake.count, engine=fake.rank, blocks=pool * len(fakes)
                )
                for fake in fakes
            ]
            return "process_start_time_seconds 1.0\n" + "".join(each)
        told = {}
        for fake in fakes:
            told[str(fake.rank)] = json.loads(sources(f"tcp://127.0.0.1:{ports[fake.rank]}", None))["0"]
        return json.dumps(told) if of == "kv_event_sources" else "{}"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            raw = answer(self.path).encode()
            self.send_response(200 if raw else 503)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    if given.hour:
        for line in sys.stdin:  # of how many requests for each server, and of a server that starts anew
            count, restarted = map(int, line.split())
            for fake in fakes:
                fake.back = float("inf") if fake.rank == restarted else 0.0
                if fake.rank == restarted:
                    fake.anew()
            for _ in range(count):
                for fake in fakes:
                    if not fake.back:
                        fake.ask()
            print("sent", flush=True)
        return
    sys.stdin.readline()  # the watcher is there
    begun = time.monotonic()
    sent, restarts = [0.0] * len(fakes), 0
    while True:
        now = time.monotonic()
        if given.restart and now > begun + (restarts + 1) * given.restart:
            fake = fakes[restarts % len(fakes)]
            fake.anew()
            fake.back = now + AWAY_S
            restarts += 1
        for at, fake in enumerate(fakes):
            if fake.back > now:
                sent[at] = (now - begun) * given.requests
            while sent[at] < (now - begun) * given.requests:
                fake.ask()
                sent[at] += 1
        if (now - begun) * given.requests - min(sent) > given.requests:
            print("the publisher cannot keep up", file=sys.stderr, flush=True)
        time.sleep(0.005)


def _ports(count: int) -> int:
    """Return the first of `count` free ports in a row."""
    import socket

    for first in range(20_000, 30_000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as free:
                    free.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
    raise SystemExit("no free ports")


def memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def watch(given: argparse.Namespace, port: int, go: Callable[[], None]) -> None:
    base = f"http://127.0.0.1:{port}"
    urls = [f"{base}/{number}" for number in range(given.servers)]
    alone = Watched(Server(f"{base}/all"), ask_s=ASK_S)
    fleet = Servers(
        Addresses(urls), lambda url, named, others: Watched(Server(url), named, others, ask_s=ASK_S)
    )
    watcher = alone if given.watched_as == "ranks" else fleet
    watcher.start()
    go()
    begun = shown = time.monotonic()
    cpu, lags = time.process_time(), []
    while time.monotonic() < begun + given.seconds:
        members = [alone] if watcher is alone else [member.watched for member in fleet.members.values()]
        streams = [s for member in members if member.reader for s in member.reader.streams.values()]
        before = [stream.at for stream in streams if stream.at and not given.restart]
        watcher.look()
        lags += [time.time() - min(before)] if before else []
        problem = next((m.reader.problem for m in members if m.reader and m.reader.problem), "")
        if problem:
            raise SystemExit(problem)
        if time.monotonic() > shown + PRINT_S:
            seconds, shown = time.monotonic() - shown, time.monotonic()
            used, cpu = time.process_time() - cpu, time.process_time()
            late = f"{np.median(lags):.2f} s, at most {max(lags):.2f} s" if lags else "-"
            known = sum(len(blocks.known) for member in members for blocks in member.account.blocks.values())
            print(
                f"{shown - begun:6.0f} s   {used / seconds:.2f} cores   {memory_mb():,.0f} MB   lag {late}   "
                f"batches {sum(s.last + 1 for s in streams):,}, lost {sum(s.lost for s in streams)}   "
                f"blocks known {known:,}   load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            lags.clear()
        time.sleep(LOOK_S)
    watcher.close()


def watch_hour(given: argparse.Namespace, port: int, ask: Callable[[int, int], None]) -> None:
    """Watch each minute's requests in `LOOKS` looks; in each minute a server restarts, and another is away."""
    urls = [f"http://127.0.0.1:{port}/{number}" for number in range(given.servers)]
    addresses = Addresses(list(urls))
    fleet = Servers(addresses, lambda url, named, others: Watched(Server(url), named, others, ask_s=0.0))
    fleet.start()
    count = max(1, round(60 * given.requests / given.hour / LOOKS))
    batches, cpu = 0, time.process_time()
    for minute in range(60):
        away = urls[(minute + given.servers // 2) % given.servers]
        addresses.urls = [url for url in urls if url != away]
        fleet._read = 0.0  # the addresses are read again in each look after 10 s
        for look in range(LOOKS):
            ask(count, minute % given.servers if look == 0 else -1)
            batches += count * (given.servers - 1)
            shot = fleet.look()
        members = [member.watched for member in fleet.members.values()]
        accounts = [blocks for member in members for blocks in member.account.blocks.values()]
        streams = [s for member in members if member.reader for s in member.reader.streams.values()]
        used, cpu = time.process_time() - cpu, time.process_time()
        print(
            f"minute {minute + 1:2}   {memory_mb():,.0f} MB   {1000 * used / batches:.2f} ms a batch   "
            f"blocks known {sum(len(blocks.known) for blocks in accounts):,}   restarts "
            f"{sum(member.restarts for member in members)}   lost {sum(s.lost for s in streams)}   "
            f"prompt tokens {shot.fleet.prompt_tokens:,}",
            flush=True,
        )
        batches = 0
    fleet.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--servers", type=int, default=16)
    parser.add_argument("--requests", type=float, default=50.0)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--hit", type=float, default=0.5)
    parser.add_argument("--pool", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--restart", type=float, default=0.0)
    parser.add_argument("--hour", type=float, default=0.0)
    parser.add_argument("--as", dest="watched_as", choices=("ranks", "servers"), default="servers")
    parser.add_argument("--publish", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.publish:
        publish(given)
        return
    command = [sys.executable, "-m", "bench.watched", *sys.argv[1:], "--publish"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None
    stdin = child.stdin

    stdout = child.stdout

    def go() -> None:
        stdin.write("\n")
        stdin.flush()

    def ask(count: int, restarted: int) -> None:
        stdin.write(f"{count} {restarted}\n")
        stdin.flush()
        stdout.readline()

    try:
        with rare_collections():
            port = int(stdout.readline())
            watch_hour(given, port, ask) if given.hour else watch(given, port, go)
    finally:
        child.kill()
        child.wait()


if __name__ == "__main__":
    main()
