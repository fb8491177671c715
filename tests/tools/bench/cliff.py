"""Where the device is full: predicted by `kvtune capacity --like RUN`, and seen on the CPU engine in a closed loop.

python -m tests.tools.bench.cliff FOLDER [--load agents-1 ..] -> reports/tables/cliff.md

Idle machine. RUN is one profile of another load. Each load is then played on the real engine with N sessions at once,
from the predicted N on, until the fewest are found with which a prompt waits for its turn in more than half of the time

# The engine's core computes in its own thread, whose CPU clock the cost is fitted to.
ONE_THREAD = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
(docs/capacity.md). FOLDER keeps the run files and what was found; a load that it has is not measured again.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path

import msgspec

from kvtune.capacity.estimate import Window
from kvtune.capacity.question import WARM_SHARE
from kvtune.capacity.replays import Bench, Task, figures
from kvtune.capacity.result import Capacity, Seed
from kvtune.capacity.search import FULL, largest
from kvtune.cli.app import run as command
from kvtune.engine.like import cost_of
from kvtune.engine.messages import Event
from kvtune.engine.profile import EngineBench
from kvtune.engine.setup import Load, Setup, Simulated
from kvtune.errors import EXIT_INTERRUPTED, KvtuneError
from kvtune.files import replacing
from kvtune.run.file import SUFFIX, read_run
from kvtune.run.types import Run
from kvtune.sim.simulators import Simulators
from kvtune.workload.spec import build, with_keys

# The engine's core computes in its own thread, whose CPU clock the cost is fitted to.
ONE_THREAD = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
TABLE = Path("reports/tables/cliff.md")
MODEL = "tiny-llama"
FLAGS = [
    *("--distributed-executor-backend", "uni", "--block-size", "32", "--num-gpu-blocks-override", "1000"),
    *("--max-num-batched-tokens", "256", "--max-model-len", "8192", "--max-num-seqs", "64"),
]
FITTED = (
    "agents:sessions=8,turns=6,context=2000,tools=100,output=20,think=0.3,window=5000,max_think=1,different=30,"
    "longest=8000,hours=0.01,seed=77"
)
SECONDS = 60
LOADS = {
    "agents-1": "turns=12,context=1500,tools=60,output=12,think=2,window=6000,max_think=10,different=40,longest=8000",
    "agents-2": "turns=8,context=2500,tools=150,output=24,think=1,window=7000,max_think=4,different=40,longest=8000",
    "agents-3": "turns=20,context=900,tools=40,output=40,think=3,window=4000,max_think=20,subagents=0.1,different=40,"
    "longest=8000",
}


class Played(msgspec.Struct, frozen=True):
    """N sessions at once: on the engine, and in a replay with the same step cost. `load`: the machine's, before."""

    sessions: int
    engine: Seed
    replay: Seed
    load: float


class Found(msgspec.Struct, frozen=True):
    """Of one load: the fewest sessions that fill the device. `by_seed`: predicted; the engine plays the first seed.

    `played`: by the engine, so far.
    """

    spec: str
    by_seed: list[int]
    most: int
    unit: int
    played: list[Played] = []

    @property
    def seen(self) -> tuple[int, int]:
        """Between which numbers, both included, the fewest are with which the engine's device is full."""
        full = min((one.sessions for one in self.played if one.engine.waiting > FULL), default=self.most + 1)
        room = (one.sessions for one in self.played if one.sessions < full)
        return 1 + max(room, default=0), full

    @property
    def close(self) -> bool:
        low, high = self.seen
        return high <= self.most and high - low < max(1, high * CLOSE)


class Close(Exception):
    """The search has come as close as is wanted."""


CLOSE = 0.1
"""Numbers of sessions that are this near to each other are not told apart: a run takes over a minute."""


def filled(waiting: Callable[[int], float], near: int, most: int) -> int:
    """Return the fewest sessions with which a prompt waits in more than `FULL` of the time, beginning near a number."""
    return 1 + largest(lambda sessions: waiting(sessions) <= FULL, most, near)


def spec_of(name: str) -> str:
    return f"agents:{LOADS[name]},hours={SECONDS / 3600:.6f}"


def profiled(spec: str, folder: Path, seconds: float = 0.0) -> Run:
    """Profile the engine with a load; after `seconds`, if given, it is interrupted as by Ctrl-C."""
    setup = Setup(model=MODEL, load=Load.of(build(spec, seed=0)), core="stock", engine_args=list(FLAGS))
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))

    def watch(event: Event) -> None:
        if seconds and event.kind == "phase" and event.name == "measuring":
            timer.start()

    try:
        ran = EngineBench(folder, environment=ONE_THREAD).run(setup, watch)
    finally:
        timer.cancel()
    if ran.error is not None and (ran.error.exit_code != EXIT_INTERRUPTED or not seconds):
        raise ran.error
    return ran.run


def predicted(spec: str, fitted: Path) -> Found:
    out = io.StringIO()
    with redirect_stdout(out):
        words = ["capacity", MODEL, "-w", spec, "--like", str(fitted), "--no-remedies", "--json"]
        code = command([*words, "--", *FLAGS])
    assert code == 0, out.getvalue()
    said = msgspec.convert(json.loads(out.getvalue()), Capacity)
    assert said.collapse is not None, "no number of sessions fills the device"
    sessions = said.collapse.sessions
    return Found(spec, sessions.by_seed, sessions.most, said.pool.block_tokens)


def measured(known: Path, name: str, fitted: Path) -> None:
    """Go on with a load's file until the engine's number is found."""
    spec = spec_of(name)
    found = read_found(known) if known.exists() else predicted(spec, fitted)
    print(f"{name}: predicted {found.by_seed}", flush=True)
    like = Setup(model=MODEL, engine_args=list(FLAGS), device=Simulated()).like(read_run(fitted)).sized()
    window = Window(SECONDS * WARM_SHARE, SECONDS)
    played = {one.sessions: one for one in found.played}
    with Simulators(1, MODEL) as simulators:
        bench = Bench(simulators, spec, SECONDS / 3600, window)

        def waiting(sessions: int) -> float:
            if sessions not in played:
                busy = os.getloadavg()[0]
                task = Task(sessions, 0, like)
                _, replay = next(bench.replayed([task], found.unit))
                if isinstance(replay, KvtuneError):
                    raise replay
                given = with_keys(spec, sessions=sessions)
                run = profiled(given, known.parent, SECONDS + 1)
                engine = figures(run, build(given, seed=0), window, found.unit, task)
                played[sessions] = Played(sessions, engine, replay, busy)
                print(f"  {row(played[sessions])}", flush=True)
            now = msgspec.structs.replace(found, played=list(played.values()))
            known.write_bytes(msgspec.json.encode(now))
            if now.close:
                raise Close
            return played[sessions].engine.waiting

        with suppress(Close):
            filled(waiting, found.by_seed[0], found.most)


def read_found(known: Path) -> Found:
    return msgspec.json.decode(known.read_bytes(), type=Found)


def row(one: Played) -> str:
    engine, replay = one.engine, one.replay
    return (
        f"| {one.sessions} | {engine.waiting:.2f} | {replay.waiting:.2f} | {1e3 * engine.ttft_p50_s:.0f} | "
        f"{1e3 * replay.ttft_p50_s:.0f} | {100 * engine.hit_rate:.1f} | {100 * replay.hit_rate:.1f} | "
        f"{engine.requests} | {one.load:.1f} |"
    )


def table(found: dict[str, Found], fitted: Run) -> list[str]:
    cost = cost_of(fitted)
    lines = [
        "# Where the device is full: predicted and seen",
        "",
        f"`python -m tests.tools.bench.cliff FOLDER`: {MODEL} on a CPU, one thread, `{' '.join(FLAGS)}`.",
        f"The step cost is fitted to one run of `{FITTED}`:",
        f"{cost.step_us:.0f} us a step, {cost.prefill_step_us:.0f} with prompts, {cost.prefill_token_us:.1f} a prompt "
        f"token, {cost.prefill_kv_us:.4f} a prompt and KV token, {cost.decode_us:.0f} a decode; held out "
        f"{cost.held_out_share:.0%}, unexplained {cost.unexplained_share:.0%}: "
        f"{'trusted' if cost.trusted else 'not trusted'}.",
        "Full: a prompt waits for its turn, or for one of the `max_num_seqs`, in more than half of the time.",
        "The engine plays seed 0. Numbers within a tenth are not told apart. Replays have the fitted cost.",
        "`load before`: of the machine, which has two cores and was shared; the engine had a higher priority.",
        "",
        "| load | predicted, seeds 0 to 7 | predicted, seed 0 | seen, seed 0 | off |",
        "|---|---|---|---|---|",
    ]
    for name, one in found.items():
        first = one.by_seed[0]
        low, high = one.seen
        seeds = f"{min(one.by_seed)} to {max(one.by_seed)}"
        off = " to ".join(f"{first / seen - 1:+.0%}" for seen in dict.fromkeys((high, low)))
        lines.append(
            f"| {name} | {seeds} | {first} | {' to '.join(map(str, dict.fromkeys((low, high))))} | {off} |"
        )
    for name, one in found.items():
        lines += [
            "",
            f"## {name}",
            "",
            f"`{one.spec}`",
            "",
            "| sessions | waiting: engine | replay | p50 first token, ms: engine | replay | hits, %: engine | replay "
            "| requests | load before |",
            "|---|---|---|---|---|---|---|---|---|",
            *(row(each) for each in sorted(one.played, key=lambda each: each.sessions)),
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--load", choices=LOADS, action="append", default=[])
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not list((folder / "fitted").glob(f"*{SUFFIX}")):
        profiled(FITTED, folder / "fitted")
    fitted = next((folder / "fitted").glob(f"*{SUFFIX}"))
    found: dict[str, Found] = {}
    for name in LOADS:
        known = folder / f"{name}.json"
        if name in (options.load or LOADS) and not (known.exists() and read_found(known).close):
            measured(known, name, fitted)
        if known.exists():
            found[name] = read_found(known)
    with replacing(TABLE) as file:
        file.write(("\n".join(table(found, read_run(fitted))) + "\n").encode())


if __name__ == "__main__":
    main()
