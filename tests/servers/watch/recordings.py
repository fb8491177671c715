"""What stock servers of vLLM published while `tests/servers/watch/load.py` sent its load, seed 1: KV events, the
client's log with the hits that the server reported, and /metrics at the end. Recorded once: four servers of 0.32,
three of each of 0.29 to 0.31; no vLLM is needed. Another one: `python -m tests.servers.watch.recordings URL MODEL
REPLAY_ENDPOINT OUT.xz`.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import lzma
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import msgspec

from kvtune.requests.log.logged import Logged
from kvtune.servers.watch.events import Received, decoded
from tests.servers.watch.load import Load, send_all
from tests.servers.watch.traffic import kept_lines

FOLDER = Path(__file__).with_name("recorded")
NAMES = ("full_attention", "sliding_windows", "sliding_windows_large_pool", "states")
OLDER = tuple(
    f"{name}-{v}"
    for name in ("full_attention", "sliding_windows", "states")
    for v in ("0.29", "0.30", "0.31")
)
"""Of older versions: tiny-llama, tiny-gemma3, tiny-qwen3next."""
TIER = "full_attention_tier"
TIERS = (TIER, "full_attention_small_tier")
"""tiny-llama with `--kv-offloading-size` 0.05 and 0.004 (seed 5), and kvtune's plugin: a CPU has no tier without it."""


@dataclass(frozen=True)
class Recorded:
    payloads: Sequence[tuple[int, bytes]]
    log: Sequence[Logged]
    metrics: str

    def received(self, start: int = 0) -> list[Received]:
        return [Received(0, decoded(payload)) for _, payload in self.payloads[start:]]

    def sequential(self) -> list[Logged]:
        """The requests that came one after another."""
        return [one for one in self.log if not one.name.startswith(("same", "together"))]


@cache
def recorded(name: str) -> Recorded:
    if name in (*OLDER, *TIERS):
        older = msgspec.msgpack.decode(lzma.decompress((FOLDER / f"{name}.xz").read_bytes()))
        return Recorded(older["batches"], [Logged(**row) for row in older["log"]], older["metrics"])
    document = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    return Recorded(
        [(number, base64.b64decode(text)) for number, text in document["batches"]],
        [Logged(**row) for row in document["log"]],
        document["metrics"],
    )


def main() -> None:
    """Send the load to a server that was just started, and keep what it published and counted."""
    import zmq

    base, model, replay, out = sys.argv[1:5]
    sent = asyncio.run(send_all(base, model, Load(1)))
    batches: list[tuple[int, bytes]] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(replay)
        socket.send_multipart([b"", (0).to_bytes(8, "big")])
        while (number := int.from_bytes((frames := socket.recv_multipart())[2], "big", signed=True)) >= 0:
            batches.append((number, frames[3]))
    with urllib.request.urlopen(f"{base}/metrics") as answer:
        metrics = kept_lines(answer.read().decode())
    document = {"batches": batches, "log": [asdict(row) for row in sent], "metrics": metrics}
    Path(out).write_bytes(lzma.compress(msgspec.msgpack.encode(document), preset=9))


if __name__ == "__main__":
    main()
