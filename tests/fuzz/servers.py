"""What a server may say: /metrics, its other answers, KV events, replays. Each through all that kvtune does with it.

No network: a transport in memory, and a reader of events without sockets. What only the catch-all of a look or of the
reader's thread would catch counts as wrong.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from kvtune.base.errors import KvtuneError
from kvtune.data.layout.model_config import shape_at_hand
from kvtune.data.show.screen import document_lines
from kvtune.servers.watch.addresses import Addresses
from kvtune.servers.watch.client import Client
from kvtune.servers.watch.document import document
from kvtune.servers.watch.endpoints import Named, Way, sources, way
from kvtune.servers.watch.events import Asked, Reader, Stream
from kvtune.servers.watch.export import Exporter
from kvtune.servers.watch.server import Server
from kvtune.servers.watch.servers import Servers
from kvtune.servers.watch.snapshot import Snapshot
from kvtune.servers.watch.watched import Watched
from tests.fuzz.mutate import TEXTS, VALUES, bytes_changed, json_changed
from tests.servers.watch.played import counters
from tests.servers.watch.recordings import NAMES, recorded

BASE = "http://played"
BATCHES = 5
CATCH_ALL = ("says what kvtune cannot read", "kvtune cannot count them", "the reader ended")


class Body(httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content


class Said(Server):
    """A server with these answers by path, each as often as it is asked for; the last one stays."""

    def __init__(self, **answers: Sequence[bytes]) -> None:
        self.base = BASE
        left = {name: list(texts) for name, texts in answers.items()}

        def answer(request: httpx.Request) -> httpx.Response:
            texts = left.get(request.url.path.rpartition("/")[2], [b"{}"])
            return httpx.Response(200, stream=Body(texts.pop(0) if len(texts) > 1 else texts[0]))

        self.client = Client(BASE, transport=httpx.MockTransport(answer))


def _shown(shot: Snapshot) -> None:
    document_lines(document(shot), 80)
    json.dumps(msgspec.to_builtins(shot), allow_nan=False)


def _checked(message: str) -> None:
    assert not any(part in message for part in CATCH_ALL), message


def _metrics(path: Path) -> None:
    """A look with these metrics between two good ones: the exporter is alive and adds up at the end."""
    good = counters(100, 40).encode()
    said: list[str] = []
    servers: list[Servers] = []

    def new() -> Servers:
        last = counters(300, 90, started=time.time())  # begun after the one that was recorded
        server = Said(metrics=[good, good, path.read_bytes(), last.encode()])
        watched = Watched(server, shape_at_hand=lambda *_: shape_at_hand("tiny-gemma3", False))
        servers.append(Servers(Addresses(["http://said"], lookup=lambda *_: []), lambda *_: watched))
        return servers[-1]

    exporter = Exporter(new, said.append)
    try:
        for _ in range(4):
            exporter.look()
        for line in said:
            _checked(line)
            assert len(line) < 1000 and "\n" not in line
        values: dict[str, float] = {}
        for metric in exporter.collect():
            for sample in metric.samples:
                values[sample.name] = values.get(sample.name, 0.0) + sample.value
        missed = values["kvtune_prompt_tokens_total"] - values["kvtune_hit_tokens_total"]
        assert values["kvtune_server_up"] == 1 and values["kvtune_missed_tokens_total"] == missed
        shot = servers[-1].look()
        assert isinstance(shot, Snapshot)
        _shown(shot)
    finally:
        exporter.close()
    if said:
        raise KvtuneError(said[0])


def _sources(path: Path) -> None:
    server = Said(kv_event_sources=[path.read_bytes()])
    try:
        found = server.event_sources()
    finally:
        server.close()
    for rank, source in found.items():
        for named in (Named(), Named(["ipc:///run/a"], "tcp://127.0.0.1:6000")):
            chosen = way(rank, source, "gpu-7", named)
            assert chosen.bind in ("", f"tcp://127.0.0.1:{6000 + rank}")
            for end in (chosen.connect, chosen.replay):
                assert not end or end.startswith("tcp://gpu-7:") or end in named.events
            assert all("\n" not in note for note in chosen.notes)
    if not found:
        raise KvtuneError("no sources")


def _answers(path: Path) -> None:
    text = path.read_bytes()
    server = Said(version=[text], models=[text], tokenize=[text], detokenize=[text], server_info=[text])
    try:
        server.version().encode()
        assert 0 <= server.longest() <= 1 << 31
        server.text_of([1]).encode()
        assert all(0 <= limit <= 1 << 53 for limit in server.scheduler_limits(5.0) or ())
        ids = server.tokenized({"prompt": "Hi"})
        assert all(isinstance(one, int) and 0 <= one < 1 << 32 for one in ids)
    finally:
        server.close()


Frames = list[tuple[int, bytes]]


class Played(Reader):
    """A reader without sockets, whose replay has these frames."""

    def __init__(self, frames: Frames) -> None:
        super().__init__(
            {0: sources({"0": {"endpoint": "tcp://*:1", "replay_endpoint": "tcp://*:2"}})[0]}, "gpu-7"
        )
        self.streams[0] = Stream(connected=True)
        self._ways = {0: Way(connect="tcp://gpu-7:1", replay="tcp://gpu-7:2")}
        self._subscribers, self._monitors = {}, {}
        self._frames = frames

    def close(self) -> None:
        pass

    def _ask(self, rank: int, endpoint: str, before: int | None, end: float) -> Asked:
        for index, (number, payload) in enumerate(self._frames):
            frame = max(0, number).to_bytes(9, "big").lstrip(b"\0").rjust(8, b"\0")
            ended = self.replayed(rank, [b"", b"", frame, payload], before, first=index == 0)
            if ended is not None:
                return ended
        return Asked.GAP if self._frames else Asked.SILENT


def _frames(data: bytes) -> Frames:
    """Numbers and payloads of a JSON file; any other content is the payload of one batch."""
    try:
        rows = json.loads(data)
        made = []
        for index, row in enumerate(rows):
            number, batch = row
            try:
                payload = msgspec.msgpack.encode(batch)
            except (OverflowError, ValueError, RecursionError):
                payload = str(batch).encode(errors="replace")
            made.append((number if type(number) is int and number < 1 << 64 else index, payload))
        return made
    except (ValueError, TypeError, RecursionError):
        return [(0, data)]


def _watched(frames: Frames, play: Callable[[Played], None]) -> None:
    watching = Watched(Said(metrics=[counters(50_000, 400).encode()]))
    reader = Played(frames)
    try:
        watching.start()
        watching.reader = reader
        play(reader)
        for _ in range(2):
            try:
                _shown(watching.look())
            except KvtuneError as error:
                _checked(error.message)
                raise
        _checked(reader.problem)
        for blocks in watching.account.blocks.values():
            for name in list(blocks.known)[:200]:
                assert len(chain := blocks.chain(name)) == len(set(chain))
    finally:
        watching.close()
    if reader.streams[0].last < 0 or reader.streams[0].unknown == len(frames):
        raise KvtuneError("no batch was read")


def _events(path: Path) -> None:
    frames = _frames(path.read_bytes())

    def play(reader: Played) -> None:
        reader._frames = []
        for number, payload in frames:
            reader.hear(0, [b"", max(0, number).to_bytes(8, "big"), payload])
        while reader._heard:
            reader._got(*reader._heard.popleft())

    _watched(frames, play)


def _replay(path: Path) -> None:
    frames = _frames(path.read_bytes())

    def play(reader: Played) -> None:
        reader._fill(0, None)
        for number in (5, 5, 0, 40, BATCHES + 50):
            reader._got(0, number, frames[number % len(frames)][1] if frames else b"", 0.0)

    _watched(frames, play)


def _payload(path: Path) -> None:
    """The bytes of one message, between two good batches."""
    good = msgspec.msgpack.encode([9.0, [{"type": "AllBlocksCleared"}], 0])
    frames = [(0, good), (1, path.read_bytes()), (2, good)]

    def play(reader: Played) -> None:
        for number, payload in frames:
            reader._got(0, number, payload, 0.0)
        assert reader.streams[0].last == 2

    _watched(frames, play)
    if b"BlockStored" not in frames[1][1]:
        raise KvtuneError("no event was left")


def series_changed(data: bytes, draw: random.Random) -> bytes:
    """Prometheus' text: values, labels and whole lines that a server does not send."""
    lines = data.split(b"\n")
    for _ in range(draw.choice((1, 1, 3, 10))):
        at = draw.randrange(len(lines))
        name, blank, value = lines[at].rpartition(b" ")
        odd = draw.choice(
            (*TEXTS, *(str(one).encode(errors="replace") for one in VALUES), b"+Inf", b"-Inf", b"1 2")
        )
        match draw.randrange(5):
            case 0 | 1 if blank:
                lines[at] = name + b" " + odd
            case 2 if b'="' in name:
                before, _, after = name.partition(b'="')
                lines[at] = before + b'="' + odd + b'"' + after.partition(b'"')[2] + b" " + value
            case 3:
                lines[at : at + draw.choice((0, 1))] = draw.choices(lines, k=draw.choice((0, 1, 20)))
            case _:
                lines[at] = bytes_changed(lines[at], draw)
    return b"\n".join(lines)


def _recordings() -> list[tuple[str, bytes]]:
    return [(name, recorded(name).metrics.encode()) for name in NAMES]


def _batches() -> list[tuple[str, bytes]]:
    files = []
    for name in NAMES:
        rows = [(n, msgspec.msgpack.decode(payload)) for n, payload in recorded(name).payloads]
        short = [rows[at] for at in (*range(BATCHES), len(rows) - 2, len(rows) - 1) if at < len(rows)]
        files.append((name, json.dumps(short).encode()))
    return files


def _payloads() -> list[tuple[str, bytes]]:
    return [(f"{name} {n}", payload) for name in NAMES for n, payload in recorded(name).payloads[:6]]


SAID = json.dumps(
    {
        str(rank): {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": end,
            "replay_endpoint": "tcp://*:5558",
            "topic": "",
        }
        for rank, end in enumerate(("tcp://*:5557", "ipc:///run/a", "tcp://10.0.0.1:5557"))
    }
).encode()
OTHERS = b'{"version": "0.32.0", "tokens": [1, 2, 3], "prompt": "Hi", "data": [{"id": "m", "max_model_len": 4096}]}'

SERVERS: dict[str, tuple[Callable[[], Sequence[tuple[str, bytes]]], Any, Callable[[Path], object]]] = {
    "metrics": (_recordings, series_changed, _metrics),
    "sources": (lambda: [("a.json", SAID)], json_changed, _sources),
    "answers": (lambda: [("a.json", OTHERS)], json_changed, _answers),
    "events": (_batches, json_changed, _events),
    "replay": (_batches, json_changed, _replay),
    "payload": (_payloads, bytes_changed, _payload),
}
"""Of each: the seeds, how they are changed, and what is done with one."""
