"""What `vllm serve` drives, by the number of its API servers; stock and core in alternating pairs.

    python tests/tools/bench/serve.py    # three pairs, 1 and 2 API servers, 256 requests of 200 tokens
    python tests/tools/bench/serve.py 1 --batch 64 --step-us 20000  # each token is an event: nothing waits

Streams and whole answers, with text (a tokenizer of 500 tokens), on a device whose steps take `--step-us`
(docs/host.md). CPU time is of all API servers; the client, which looks for the ends of events, has the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import monotonic, process_time
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[3]))

import psutil

from kvtune.engine.models import builtin
from kvtune.engine.sockets import socket_folder
from kvtune.fake_device.settings import constant, write_device
from kvtune.run.machine import this_host
from tests.engine.serving import PID, asking, environment, flags, served, tokenizer_in
from tests.tools.bench.ratio import ratio

MODEL = "m"
SERVERS = (1, 2)
MODES = ("streams", "whole answers")
FIGURES = {
    "tokens_s": "output tokens/s",
    "servers_us": "API servers, CPU us a token",
    "client_us": "client, CPU us a token",
    "chunk": "tokens an event",
}


class Client(asyncio.Protocol):
    """One request. Counts events; keeps the head of the answer and its end."""

    def __init__(self, host: str, body: Mapping[str, object]) -> None:
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        self._request = head.encode() + content
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.head, self.tail, self.events = b"", b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if len(self.head) < 2048:
            self.head += data
        self.events += data.count(b"data: {")
        self.tail = (self.tail + data)[-2048:]

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    @property
    def pid(self) -> int:
        return int(self.head.partition(PID.encode() + b": ")[2].partition(b"\r\n")[0])


async def answered(base: str, mode: str, batch: int, tokens: int) -> tuple[set[int], int]:
    """The processes that answered, and how many events came."""
    address = urlsplit(base)
    assert address.hostname and address.port
    loop = asyncio.get_running_loop()
    clients = []
    for number in range(batch):
        body = asking(number, tokens, MODEL)
        if mode == "streams":
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        client = Client(address.netloc, body)
        await loop.create_connection(lambda client=client: client, address.hostname, address.port)  # type: ignore[misc]
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    usage = f'"completion_tokens":{tokens}'.encode()
    assert all(usage in client.tail for client in clients), "an answer is incomplete"
    return {client.pid for client in clients}, sum(client.events for client in clients)


def cpu_s(pids: set[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def measured(base: str, mode: str, servers: int, batch: int, tokens: int) -> dict[str, float]:
    pids: set[int] = set()
    while len(pids) < servers:
        pids |= (await answered(base, mode, 16 * servers, 8))[0]
    before, began, mine = cpu_s(pids), monotonic(), process_time()
    _, events = await answered(base, mode, batch, tokens)
    wall, spent, client = monotonic() - began, cpu_s(pids) - before, process_time() - mine
    made = batch * tokens
    # The last event of a stream is its usage.
    chunk = made / (events - batch) if mode == "streams" else float(tokens)
    return {
        "tokens_s": made / wall,
        "servers_us": 1e6 * spent / made,
        "client_us": 1e6 * client / made,
        "chunk": chunk,
    }


def run(core: str, servers: int, batch: int, tokens: int, step_us: float) -> dict[str, dict[str, float]]:
    """Figures by mode, of one server."""
    script = Path(__file__).parents[2] / "engine" / "serve_on_host.py"
    with tempfile.TemporaryDirectory() as folder, socket_folder() as sockets:
        write_device(constant(step_us), Path(folder))
        words = [*flags("tiny-opt", MODEL, tokenizer_in(Path(folder)), servers), "--max-num-seqs", "1024"]
        command = [sys.executable, str(script), str(builtin("tiny-opt"))]
        variables = {**environment(core, Path(folder)), **sockets, "VLLM_LOGGING_LEVEL": "ERROR"}
        quiet = ["--max-num-batched-tokens", "8192", "--disable-uvicorn-access-log"]
        with served(Path(folder), command, [*words, *quiet], variables) as base:
            return {mode: asyncio.run(measured(base, mode, servers, batch, tokens)) for mode in MODES}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("pairs", nargs="?", type=int, default=3)
    parser.add_argument("--servers", type=int, action="append")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--output", type=int, default=200)
    parser.add_argument("--step-us", type=float, default=0.0, help="what a step of the device takes")
    options = parser.parse_args()
    load = options.batch, options.output, options.step_us
    host = this_host()
    print(
        f"{options.batch} requests at once, {options.output} tokens each, {options.step_us:g} us a step; "
        f"{host.cpu}, {host.cores} cores"
    )
    print(
        f"\n| API servers | pair | | | {' | '.join(FIGURES.values())} | load |\n|{'---|' * (len(FIGURES) + 5)}"
    )
    runs: dict[tuple[int, str, str], list[dict[str, float]]] = {}
    counts = options.servers or SERVERS
    for pair in range(options.pairs):
        for servers in counts:
            for core in ("stock", "kvtune") if pair % 2 == 0 else ("kvtune", "stock"):
                for mode, made in run(core, servers, *load).items():
                    runs.setdefault((servers, mode, core), []).append(made)
                    cells = " | ".join(f"{made[figure]:,.4g}" for figure in FIGURES)
                    busy = os.getloadavg()[0]
                    print(f"| {servers} | {pair + 1} | {core} | {mode} | {cells} | {busy:.1f} |", flush=True)
    print(f"\n| API servers | | | stock | kvtune | kvtune / stock | 95 % interval |\n|{'---|' * 7}")
    for servers in counts:
        for mode in MODES:
            for figure, words in FIGURES.items():
                sides = [[made[figure] for made in runs[servers, mode, core]] for core in ("stock", "kvtune")]
                middle, low, high = ratio(*sides)
                stock, core_ = (f"{statistics.median(side):,.4g}" for side in sides)
                print(
                    f"| {servers} | {mode} | {words} | {stock} | {core_} | {middle:.3f} | {low:.3f} to {high:.3f} |"
                )


if __name__ == "__main__":
    main()
