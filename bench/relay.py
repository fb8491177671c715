"""Latency that `kvtune tap` adds: streams through it and beside it, in alternating rounds.

A stand-in server sends `--chunks` pieces of each of `--streams` streams, one each `--every` ms, each with the time at
which it was sent; the client reads them. Printed: milliseconds from the server's send to the client's read, direct and
relayed, p50 and p99, and the difference of each pair of rounds. Server, relay and client are separate processes.

    python bench/relay.py --rounds 7

With `--real WORDS` the server is vLLM's own with tiny-llama, whose prompts have that many words, each prompt a new one,
and the tap renders, compares and logs them: printed are the time to the first token and the time between two.

    python -m bench.relay --real 1000 --rounds 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
BODY = json.dumps({"messages": [{"role": "user", "content": "x" * 2000}], "stream": True}).encode()


async def serve(chunks: int, every_s: float) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if not head.startswith(b"POST /v1/chat/completions "):
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                    writer.close()
                    return
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(HEAD)
                begin = time.monotonic()
                for number in range(chunks):
                    await asyncio.sleep(max(0.0, begin + number * every_s - time.monotonic()))
                    text = b'data: {"at": %.6f, "pad": "%s"}\n\n' % (time.time(), b"x" * 180)
                    writer.write(b"%x\r\n%s\r\n" % (len(text), text))
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    made = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024)
    print(made.sockets[0].getsockname()[1], flush=True)
    await made.serve_forever()


async def stream(port: int) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY
    )
    await reader.readuntil(b"\r\n\r\n")
    late = []
    while (size := int(await reader.readline(), 16)) > 0:
        piece = await reader.readexactly(size + 2)
        late.append(1000 * (time.time() - json.loads(piece[6:])["at"]))
    writer.close()
    return late


async def round_of(port: int, streams: int) -> list[float]:
    return [one for row in await asyncio.gather(*(stream(port) for _ in range(streams))) for one in row]


async def generated(port: int, prompt: str, chunks: int) -> tuple[list[float], list[float]]:
    """Return ms until the first token, and between two tokens."""
    asked = {
        "model": "tiny-llama",
        "prompt": prompt,
        "stream": True,
        "max_tokens": chunks,
        "ignore_eos": True,
    }
    body = json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n"
    last = time.monotonic()
    writer.write(head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + body)
    times = []
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            times.append(1000 * (time.monotonic() - last))
            last = time.monotonic()
    writer.close()
    assert len(times) > 1, "the server refuses the prompt"
    return times[:1], times[1:]


async def generation(port: int, streams: int, words: int, chunks: int, name: str) -> dict[str, list[float]]:
    text = " ".join(f"word {number}" for number in range(words // 2))
    asked = [generated(port, f"{name} {number} {text}", chunks) for number in range(streams)]
    rows = await asyncio.gather(*asked)
    return {what: [ms for row in rows for ms in row[at]] for at, what in enumerate(("first token", "gap"))}


def real(words: int, streams: int, rounds: int, chunks: int) -> None:
    from tests.lab.engine.test_watch import builtin, stock
    from tests.servers.tap.test_command import tap
    from tests.tokenizers import make_tokenizer

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "model"
        shutil.copytree(builtin("tiny-llama"), model)
        make_tokenizer(model)
        more = {"max_model_len": "131072", "num_gpu_blocks_override": "20000", "enable_scale_out": ""}
        with (
            stock(folder, "tiny-llama", served_from=model, **more) as base,
            tap(base, "-o", str(folder / "log.jsonl")) as relayed,
        ):
            sides = [("direct", int(base.rpartition(":")[2])), ("tap", relayed.port)]
            added: dict[tuple[str, float], list[float]] = {}
            for number in range(rounds + 1):
                got = {
                    side: asyncio.run(generation(port, streams, words, chunks, f"{side} {number}"))
                    for side, port in sides[:: 1 if number % 2 else -1]
                }
                for what in got["direct"] if number else ():  # the first round warms the server up
                    for share in (0.5, 0.99):
                        direct, tapped = (quantile(got[side][what], share) for side in ("direct", "tap"))
                        added.setdefault((what, share), []).append(tapped - direct)
                        ms = f"direct {direct:.1f}, tap {tapped:.1f} ms"
                        print(f"round {number} {what} p{100 * share:.0f}: {ms}", flush=True)
            for (what, share), row in added.items():
                spread = f"{statistics.median(row):.2f} ms ({min(row):.2f} to {max(row):.2f})"
                print(f"added {what} p{100 * share:.0f}: median {spread}")
            relayed.until(lambda: sum(line.startswith("#") for line in relayed.out) == streams * (rounds + 1))
            print(relayed.out[-3:], f"load {os.getloadavg()[0]:.1f}")


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--every", type=float, default=20.0, help="ms")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--real", type=int, default=0, metavar="WORDS")
    asked = parser.parse_args()
    if asked.real:
        real(asked.real, asked.streams, asked.rounds, asked.chunks)
        return
    if asked.serve:
        asyncio.run(serve(asked.chunks, asked.every / 1000))
        return
    words = [sys.executable, __file__, "--serve", "--chunks", str(asked.chunks), "--every", str(asked.every)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    tap = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("kvtune")),
            "tap",
            f"http://127.0.0.1:{port}",
            "--listen",
            "0",
            "--no-log",
        ],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert tap.stderr is not None
        relayed = int(tap.stderr.readline().split()[0].rpartition(":")[2])
        time.sleep(8)  # until the analyst has started
        added: dict[float, list[float]] = {0.5: [], 0.99: []}
        for number in range(asked.rounds):
            sides = [("direct", port), ("relay", relayed)]
            late = {
                name: asyncio.run(round_of(at, asked.streams))
                for name, at in sides[:: 1 if number % 2 else -1]
            }
            shown = [
                f"{name} {quantile(late[name], 0.5):.2f} / {quantile(late[name], 0.99):.2f}" for name in late
            ]
            print(f"round {number + 1}: p50 / p99 ms  " + "   ".join(sorted(shown)), flush=True)
            for share, row in added.items():
                row.append(quantile(late["relay"], share) - quantile(late["direct"], share))
        for share, row in added.items():
            print(
                f"added p{100 * share:.0f}: median {statistics.median(row):.2f} ms ({min(row):.2f} to {max(row):.2f})"
            )
    finally:
        for process in (tap, server):
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
