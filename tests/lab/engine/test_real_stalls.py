"""Stalls planted in a real engine, in one run: each gets its cause, and the process, line or request behind it."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic_ns

import numpy as np
import psutil
import pytest

from kvtune.data.run.types import Run
from kvtune.lab.engine.messages import Event
from kvtune.lab.engine.profile import EngineBench
from kvtune.lab.setup.setup import Load, Setup
from kvtune.plugin.probe.status import read_statuses
from kvtune.reading.analysis.stalls.account import Stall, Stalls, stalls
from kvtune.reading.analysis.stalls.delays import LOST
from kvtune.requests.loads.spec import build

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

DECODES, OUTPUT = 4, 4000
STOPPED_S, NEIGHBOUR_S, QUIET_S = 0.8, 1.5, 1.0
EVERYTHING = 10_000
BLIND_S = 0.6
"""Without a sample for longer than this, a stop of STOPPED_S may go unseen."""
EARLY_S = 0.5
"""A stall that began so long before a plant has another cause: the machine gave the engine no CPU."""

# In every process of the engine. The first signal makes objects, and a file when they are there; the second has them
# collected.
COLLECTS = """
import gc, os, signal
kept = []
def collect(number, frame):
    if kept:
        for _ in range(3):
            gc.collect()
        return
    gc.disable()
    kept.extend([] for _ in range(2_000_000))
    gc.enable()
    open(os.path.join(os.path.dirname(__file__), f"objects-{os.getpid()}"), "x").close()
signal.signal(signal.SIGUSR2, collect)
"""
LINE = 1 + COLLECTS.splitlines().index("            gc.collect()")

# One process starts all, and each ends by the clock: whoever starts and stops them one by one waits for a CPU, too.
BUSY = """
import os, sys, time
end = time.monotonic() + float(sys.argv[1])
for core in sys.argv[2:]:
    if os.fork() == 0:
        os.sched_setaffinity(0, {int(core)})
        while time.monotonic() < end:
            pass
        os._exit(0)
for _ in sys.argv[2:]:
    os.wait()
"""


@dataclass
class Plants:
    """Plants one stall after the other once the long prompts are done, then ends the run; remembers when each was.

    Events that came while a plant was at work are read late: the time tells when the stall before is over.
    """

    output: Path
    zero_ns: int = 0
    windows: dict[str, tuple[float, float]] = field(default_factory=dict)
    _due: Iterator[tuple[str, Callable[[], None]]] | None = None
    _quiet_until_ns: int = 0

    def on_event(self, event: Event) -> None:
        if event.kind == "phase" and event.name == "measuring":
            self.zero_ns = event.at_ns
        if event.kind != "progress" or event.finished < len(PROMPTS) or monotonic_ns() < self._quiet_until_ns:
            return
        self._due = self._due or iter(self._plants())
        if (plant := next(self._due, None)) is not None:
            name, act = plant
            with self._timed(name):
                act()
            self._quiet_until_ns = monotonic_ns() + int(QUIET_S * 1e9)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = monotonic_ns()
        yield
        self.windows[name] = ((start - self.zero_ns) / 1e9, (monotonic_ns() - self.zero_ns) / 1e9)

    def _plants(self) -> list[tuple[str, Callable[[], None]]]:
        return [
            ("objects", self._objects),
            ("collection", partial(self._signal, "engine_core", signal.SIGUSR2)),
            *((f"stop {role}", partial(self._stop, role)) for role in ("engine_core", "worker", "front_end")),
            ("neighbour", self._crowd),
            ("end", partial(self._signal, "front_end", signal.SIGTERM)),
        ]

    def _pid(self, role: str) -> int:
        (folder,) = self.output.glob(".kvtune-*")
        (pid,) = [status["pid"] for status in read_statuses(folder) if status["role"] == role]
        return int(pid)

    def _signal(self, role: str, number: signal.Signals) -> None:
        os.kill(self._pid(role), number)

    def _objects(self) -> None:
        """On a busy machine they take seconds. A collection meanwhile would be in the same gap between tokens."""
        made = self.output.parent / f"objects-{self._pid('engine_core')}"
        self._signal("engine_core", signal.SIGUSR2)
        deadline = time.monotonic() + 60.0
        while not made.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert made.exists(), "EngineCore made no objects"

    def _stop(self, role: str) -> None:
        pid = self._pid(role)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(pid, signal.SIGCONT)

    def _crowd(self) -> None:
        """Four busy processes on each core that the worker may use."""
        threads = psutil.Process(self._pid("worker")).threads()
        cores = set().union(*(os.sched_getaffinity(thread.id) for thread in threads))
        crowd = [str(core) for core in sorted(cores) * 4]
        subprocess.run([sys.executable, "-c", BUSY, str(NEIGHBOUR_S), *crowd], check=True, timeout=60)


PROMPTS = [{"timestamp": 1500, "input_length": 4000, "output_length": 1}] * 2


@dataclass(frozen=True)
class Planted:
    run: Run
    account: Stalls
    windows: dict[str, tuple[float, float]]

    def during(self, name: str, after_s: float = 0.5, most_blind_s: float = BLIND_S) -> list[Stall]:
        """Stalls that overlap with a plant. On a busy machine some of them have other causes."""
        begin_s, end_s = self.windows[name]
        if (blind_s := self.longest_blind_s(begin_s, end_s)) > most_blind_s:
            pytest.skip(
                f"the machine gave this process no CPU for {blind_s:.1f} s, so it saw little of the plant"
            )
        here = [s for s in self.account.worst if s.start_s < end_s + after_s and s.end_s > begin_s]
        if here and (early_s := begin_s - min(s.start_s for s in here)) > EARLY_S:
            pytest.skip(
                f"the engine stood still since {early_s:.1f} s before the plant: it lies in another stall"
            )
        return here

    def longest_blind_s(self, begin_s: float, end_s: float) -> float:
        """The longest time without a sample of the engine's processes around a plant."""
        at_s = np.unique(self.run.table("memory")["t_s"])
        near_s = at_s[(at_s > begin_s - 2 * BLIND_S) & (at_s < end_s + 2 * BLIND_S)]
        return float(np.diff(near_s).max(initial=0.0)) if len(near_s) > 1 else end_s - begin_s


def traced(rows: list[dict[str, int]]) -> Iterator[str]:
    """Lines of a Mooncake trace in which no two prompts share a block."""
    blocks = itertools.count()
    for row in rows:
        ids = list(itertools.islice(blocks, -(-row["input_length"] // 512)))
        yield json.dumps({**row, "hash_ids": ids})


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Planted:
    folder = tmp_path_factory.mktemp("stalls")
    (folder / "sitecustomize.py").write_text(COLLECTS)
    # Where the plants take longer, new decodes come meanwhile; the last plant ends the run.
    decodes, *later = (
        [{"timestamp": at, "input_length": 32, "output_length": OUTPUT}] * DECODES
        for at in range(0, 60_000, 5000)
    )
    trace = folder / "trace.jsonl"
    trace.write_text("".join(f"{line}\n" for line in traced([*decodes, *PROMPTS, *itertools.chain(*later)])))
    plants = Plants(folder / "out")
    job = Setup(
        model="tiny-opt",
        load=Load.of(build(f"trace:path={trace}")),
        core="stock",
        engine_args=["--max-num-batched-tokens", "8192"],
    )
    search = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    done = EngineBench(plants.output, environment={"PYTHONPATH": search}).run(job, plants.on_event)
    assert done.error is None, done.error
    assert "end" in plants.windows, "the decodes ended before the last plant"
    return Planted(done.run, stalls(done.run, shown=EVERYTHING), plants.windows)


def test_a_huge_prefill_is_named_with_its_requests(planted: Planted) -> None:
    requests = planted.run.table("requests")
    prompts = requests["id"][requests["prompt_tokens"] == 4000]
    own = [s for s in planted.account.worst if s.cause == "prefill" and {*prompts} & {*s.evidence.requests}]
    assert own, planted.account.causes
    longest = max(own, key=lambda stall: stall.excess_ms)
    assert longest.evidence.prompt_tokens >= 4000
    assert longest.gaps >= DECODES


def test_a_collection_in_engine_core_is_named_with_its_line(planted: Planted) -> None:
    here = planted.during("collection")
    assert any(
        stall.cause == "collection"
        and (stall.evidence.process, stall.evidence.generation) == ("engine_core", 2)
        and stall.evidence.line.endswith(f"sitecustomize.py:{LINE}")
        for stall in here
    ), here


@pytest.mark.parametrize("role", ["engine_core", "worker", "front_end"])
def test_a_stopped_process_is_named(planted: Planted, role: str) -> None:
    here = planted.during(f"stop {role}")
    assert any(
        (stall.cause, stall.evidence.process, stall.evidence.stopped) == ("off_cpu", role, True)
        and stall.gap_ms > 900 * STOPPED_S
        for stall in here
    ), here


def test_a_busy_neighbour_on_the_workers_cores_is_time_without_a_cpu(planted: Planted) -> None:
    begin_s, _ = planted.windows["neighbour"]
    here = [s for s in planted.during("neighbour", 0.0, NEIGHBOUR_S) if s.end_s > begin_s + 0.2]
    lost_ms = {cause: sum(s.parts_ms.get(cause, 0.0) for s in here) for cause in LOST}
    assert max(lost_ms, key=lambda cause: lost_ms[cause]) == "off_cpu" and lost_ms["off_cpu"] > 0, lost_ms
    assert {s.evidence.process for s in here if s.cause == "off_cpu"} <= {
        "worker",
        "engine_core",
        "front_end",
    }


def test_the_shares_of_a_real_run_add_up_to_all_of_the_lost_time(planted: Planted) -> None:
    found = planted.account
    assert sum(cause.share for cause in found.causes.values()) == pytest.approx(1.0)
    assert sum(cause.gaps for cause in found.causes.values()) == found.slow
    assert {"off_cpu", "prefill", "collection"} <= found.causes.keys()


def test_every_token_names_the_step_that_made_it(planted: Planted) -> None:
    tokens, steps = planted.run.table("tokens"), planted.run.table("steps")
    made = np.searchsorted(steps["t_s"], tokens["made_s"], side="right") - 1
    assert (made >= 0).all() and (tokens["made_s"] <= tokens["t_s"]).all()
    within = tokens["made_s"] <= steps["t_s"][made] + steps["step_us"][made] / 1e6
    assert within.mean() > 0.99  # EngineCore's last steps may be left out of the run
    receipts = planted.run.table("receipts")["t_s"]
    assert len(receipts) and (np.diff(receipts) >= 0).all()
