"""Runs a reader on many inputs in a child process of limited memory and time."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.readers import READERS, SEEDS, inputs, verdict
from tests.fuzz.servers import SERVERS

MEMORY = 2 << 30
SECONDS = 60
"""What one input may take."""
SERVER_MEMORY, SERVER_SECONDS = 1 << 30, 5
"""What an input of a server may take."""


@dataclass
class Outcome:
    """`wrong`: what went wrong, with the number of the first input that showed it."""

    done: int = 0
    read: int = 0
    refused: int = 0
    longest_s: float = 0.0
    peak_bytes: int = 0
    wrong: dict[str, int] = field(default_factory=dict)


def here(name: str, count: int, seed: int, *, keep: bool = False, start: int = 0) -> Outcome:
    """Read `count` inputs in this process."""
    outcome = Outcome()
    source = inputs(name, seed, start)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(start, start + count):
            data = next(source)
            began = time.monotonic()
            what, read = verdict(name, data, Path(folder))
            took = time.monotonic() - began
            outcome.longest_s = max(outcome.longest_s, took)
            outcome.done += 1
            outcome.read += read
            outcome.refused += not read and not what
            if took > (SERVER_SECONDS if name in SERVERS else SECONDS):
                what = f"took {took:.0f} s"
            kind = what.partition(": ")[0]
            if kind and not any(known.startswith(kind) for known in outcome.wrong):
                outcome.wrong[what] = number
                if keep:
                    (SEEDS / name).mkdir(parents=True, exist_ok=True)
                    (SEEDS / name / f"{seed}-{number}").write_bytes(data)
    outcome.peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return outcome


def fuzzed(name: str, count: int, seed: int = 0, *, keep: bool = False) -> Outcome:
    """The same in a child with MEMORY of address space. What kills the child is wrong, too."""
    code = (
        "import json,resource,dataclasses;from tests.fuzz.run import *;"
        "import kvtune.reading.report.run, kvtune.answers.tune.document;"
        "resource.setrlimit(resource.RLIMIT_AS,(MEMORY,MEMORY));"
        f"print(json.dumps(dataclasses.asdict(here({name!r},{count},{seed},keep={keep}))))"
    )
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, cwd=Path(__file__).parents[2]
    )
    if child.returncode:
        return Outcome(wrong={f"the child ended with {child.returncode}": -1})
    outcome = Outcome(**json.loads(child.stdout.decode().splitlines()[-1]))
    if name in SERVERS and outcome.peak_bytes > SERVER_MEMORY:
        outcome.wrong[f"took {outcome.peak_bytes >> 20} MiB"] = -1
    return outcome


__all__ = ["MEMORY", "READERS", "Outcome", "fuzzed", "here"]
