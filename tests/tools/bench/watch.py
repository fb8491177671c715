"""What `kvtune watch` costs: its own process, and the server that it watches.

`python tests/tools/bench/watch.py [--rate 200] [--seconds 20]` plays a recorded server's events and metrics at a rate
of requests and prints the watcher's CPU time, of one core. With `--engine PAIRS` a stock tiny-llama with KV events
computes loads and idles with and without a watcher, in turn: the CPU time of its processes, and their ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import httpx
import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from tests.engine.serving import free_port
from tests.engine.test_watch import stock
from tests.tools.bench.ratio import ratio
from tests.watch.load import Load
from tests.watch.played import Answers, Publisher, http, sources
from tests.watch.recordings import NAMES, recorded

RECORDED = 51
"""Requests of a recording."""
REQUESTS, PROMPT, OUTPUT = 480, 520, 16
IDLE_S = 10.0


def main() -> None:
    reader = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    reader.add_argument("--rate", type=float, default=200.0)
    reader.add_argument("--seconds", type=float, default=20.0)
    reader.add_argument("--server", choices=NAMES, default="sliding_windows")
    reader.add_argument("--engine", type=int, default=0, metavar="PAIRS")
    asked = reader.parse_args()
    if asked.engine:
        engine(asked.engine)
    else:
        own(asked.server, asked.rate, asked.seconds)


def own(server: str, rate: float, seconds: float) -> None:
    run = recorded(server)
    publisher = Publisher()
    answers = Answers(run.metrics)
    answers.paths["/kv_event_sources"] = (200, sources(publisher.endpoint, None))
    stop = threading.Event()
    batches = [msgspec.msgpack.decode(payload) for _, payload in run.payloads]

    def play() -> None:
        publisher.subscribed()
        pause, number, due = RECORDED / rate / len(batches), 0, time.monotonic()
        while not stop.is_set():
            batch = batches[number % len(batches)]
            publisher.publish([(number, msgspec.msgpack.encode([time.time(), *batch[1:]]))], remember=False)
            number += 1
            due += pause
            time.sleep(max(0.0, due - time.monotonic()))

    thread = threading.Thread(target=play, daemon=True)
    thread.start()
    with http(answers) as base:
        used = []
        for time_s in (1.0, 1.0 + seconds):  # the difference leaves the start out
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            with attached(base):
                time.sleep(time_s)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    stop.set()
    print(
        f"{server}, {rate:g} requests/s: {(used[1] - used[0]) / seconds:.3f} of a core "
        f"(start: {used[0]:.2f} s)"
    )
    thread.join()
    publisher.close()


def engine(pairs: int) -> None:
    """Two sides in turn, the order changed from pair to pair: with a watcher that is attached, and without."""
    load = Load(1)
    with tempfile.TemporaryDirectory() as name, stock(Path(name), "tiny-llama") as base:
        port = base.rpartition(":")[2]
        server = next(child for child in psutil.Process().children() if port in child.cmdline())
        core = next(child for child in server.children() if "EngineCore" in "".join(child.cmdline()))

        def cpu_ms() -> NDArray[np.float64]:
            return 1000 * np.array([sum(process.cpu_times()[:2]) for process in (server, core)])

        def busy() -> float:
            asyncio.run(compute(base, [load.words(PROMPT) for _ in range(REQUESTS)]))
            return REQUESTS * (PROMPT + OUTPUT) / 1000

        def idle() -> float:
            time.sleep(IDLE_S)
            return IDLE_S

        def used(work: Callable[[], float]) -> NDArray[np.float64]:
            before = cpu_ms()
            done = work()
            return (cpu_ms() - before) / done

        busy()
        for work, unit in ((busy, "1,000 tokens"), (idle, "idle second")):
            sides: dict[bool, list[NDArray[np.float64]]] = {False: [], True: []}
            for pair in range(pairs):
                for watched in ((True, False), (False, True))[pair % 2]:
                    with attached(base) if watched else contextlib.nullcontext():
                        sides[watched].append(used(work))
            without, watched_ = (np.array(sides[watched]) for watched in (False, True))
            for name_, columns in (("API server", [0]), ("EngineCore", [1]), ("both", [0, 1])):
                one, other = without[:, columns].sum(axis=1), watched_[:, columns].sum(axis=1)
                said = f"{name_}: {one.mean():.2f} ms a {unit}, watched {other.mean():.2f}"
                if one.all() and other.all():
                    said += " (x {:.3f}, {:.3f} to {:.3f})".format(*ratio(one, other))
                print(f"{said}, {pairs} pairs", flush=True)


async def compute(base: str, prompts: Sequence[Sequence[int]]) -> None:
    """Eight at a time."""
    limit = asyncio.Semaphore(8)
    async with httpx.AsyncClient(timeout=None) as client:

        async def send(prompt: Sequence[int]) -> None:
            body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": OUTPUT, "ignore_eos": True}
            async with limit:
                answer = await client.post(f"{base}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text

        await asyncio.gather(*map(send, prompts))


@contextlib.contextmanager
def attached(base: str) -> Iterator[None]:
    """A watcher that looks as the live view does."""
    command = [sys.executable, "-m", "kvtune", "watch", base, "--metrics", str(free_port())]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as watcher:
        try:
            assert watcher.stderr is not None and watcher.stderr.readline().startswith("metrics: ")
            time.sleep(3)  # it has read the history, and looked
            yield
        finally:
            watcher.kill()


if __name__ == "__main__":
    main()
