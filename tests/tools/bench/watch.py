"""What `kvtune watch` costs its own process: a recorded server's events and metrics, played at a rate of requests.

`python tests/tools/bench/watch.py [--rate 200] [--seconds 20]` prints the watcher's CPU time, of one core.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import msgspec

from tests.watch.played import Answers, Publisher, http, sources
from tests.watch.recordings import NAMES, recorded

REQUESTS = 51
"""Of a recording."""


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__)
    reader.add_argument("--rate", type=float, default=200.0)
    reader.add_argument("--seconds", type=float, default=20.0)
    reader.add_argument("--server", choices=NAMES, default="sliding_windows")
    asked = reader.parse_args()
    run = recorded(asked.server)
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/e"
        publisher = Publisher(endpoint)
        answers = Answers(run.metrics)
        answers.paths["/kv_event_sources"] = (200, sources(endpoint, None))
        stop = threading.Event()
        batches = [msgspec.msgpack.decode(payload) for _, payload in run.payloads]

        def play() -> None:
            publisher.subscribed()
            pause, number, due = REQUESTS / asked.rate / len(batches), 0, time.monotonic()
            while not stop.is_set():
                batch = batches[number % len(batches)]
                publisher.publish(
                    [(number, msgspec.msgpack.encode([time.time(), *batch[1:]]))], remember=False
                )
                number += 1
                due += pause
                time.sleep(max(0.0, due - time.monotonic()))

        thread = threading.Thread(target=play, daemon=True)
        thread.start()
        with http(answers) as base:
            command = [sys.executable, "-m", "kvtune", "watch", base, "--once", "--seconds"]
            used = []
            for seconds in (1.0, 1.0 + asked.seconds):  # the difference leaves the start out
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                subprocess.run(
                    [*command, str(seconds)], check=True, stdout=subprocess.DEVNULL, env=os.environ
                )
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                used.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        stop.set()
        print(
            f"{asked.server}, {asked.rate:g} requests/s: {(used[1] - used[0]) / asked.seconds:.3f} of a core "
            f"(start: {used[0]:.2f} s)"
        )
        thread.join()
        publisher.close()


if __name__ == "__main__":
    main()
