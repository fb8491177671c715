"""Records what a stock server publishes under tests/servers/watch/traffic.py, over a restart.

`python -m bench.record_traffic MODEL OUT`
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

from tests.lab.engine.serving import free_port
from tests.lab.engine.test_watch import stock
from tests.servers.watch.traffic import Listener, Sent, Traffic, write

SCALES = {"tiny-llama": 1, "tiny-gemma3": 1, "tiny-qwen3next": 3}
POOLS = {"tiny-llama": "300", "tiny-gemma3": "900", "tiny-qwen3next": "120"}


def main() -> None:
    model, out = sys.argv[1:3]
    sent: list[Sent] = []
    lives = []
    port = free_port()
    for life in range(2):
        with (
            tempfile.TemporaryDirectory(dir="/tmp") as folder,
            stock(
                Path(folder), model, port, max_num_batched_tokens="1024", num_gpu_blocks_override=POOLS[model]
            ) as base,
        ):
            listener = Listener(base)
            try:
                traffic = Traffic(base, model, life=life, scale=SCALES[model])
                sent += asyncio.run(traffic.short() if life else traffic.run())
            finally:
                listener.close()
            lives.append(listener)
    write(Path(out), lives, sent)
    print(
        len(sent),
        "requests",
        sum(len(one.prompt) for one in sent),
        "tokens",
        Path(out).stat().st_size,
        "bytes",
    )


if __name__ == "__main__":
    main()
