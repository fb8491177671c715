"""Prints on stderr what a long command will run, and about how long that takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from kvtune.base.units import count, size, span
from kvtune.data.run.durations import known_durations
from kvtune.requests.types import Workload

if TYPE_CHECKING:
    from kvtune.data.platforms import Platform
    from kvtune.lab.setup.setup import Setup

JOURNALS = 10
"""Number of newest study journals that are searched for the duration of a replay of the load."""


def begin(text: str) -> None:
    """Print what the command is doing, before it has anything else to show."""
    print(f"{text} ..", file=sys.stderr, flush=True)


def say_device(like: Platform | None) -> None:
    """Print which device is simulated, and vLLM's defaults on it: tokens and requests in a step, block size, pool."""
    from kvtune.data.platforms import BY_MEMORY, defaults
    from kvtune.lab.setup.platform import engines

    platform = engines(like)
    take = defaults(platform)
    what = (
        f"as on {platform.title}: without flags {count(int(take['max_num_batched_tokens'].value))} tokens and "
        f"{count(int(take['max_num_seqs'].value))} requests in a step, blocks of {take['block_size'].value} tokens"
    )
    if platform.memory_bytes:
        used = f"what vLLM uses of {size(platform.memory_bytes)}, less the weights, {BY_MEMORY}"
        other = f"; a pool that neither a flag nor the model sizes: {used}"
    else:
        other = "; --like-device h100 simulates a GPU's engine" if like is None else ""
    print(f"{what}{other}", file=sys.stderr, flush=True)


def say_loss(workload: Workload) -> None:
    """Print what the workload's source does not hold."""
    if workload.note:
        print(f"note: {workload.note}", file=sys.stderr, flush=True)


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def engine_plan(
    model: str, workload: Workload, runs: int, folder: Path, *, fewest: int = 0, source: str = "engine"
) -> str:
    """Return the plan as text: `2 engine runs of rounds (36 requests) ..`.

    `fewest`: of an unknown number of runs, at most `runs`. `source`: engine, or host: a simulated device.
    """
    durations = known_durations(folder, model, workload.hash, source)

    def all_of(each: Callable[[int], str]) -> str:
        return span(each(min(fewest or runs, runs)), each(runs))

    many = all_of(str)
    what = (
        f"{many} engine run{'s' if runs > 1 else ''} of {workload.name} "
        f"({count(len(workload.requests))} requests), {many} engine start{'s' if runs > 1 else ''}"
    )
    if (run_s := durations.run_s) is not None:
        time = all_of(lambda number: minutes(number * run_s))
        return f"{what}; about {time}: a run of this load takes {run_s:.0f} s here"
    if (start_s := durations.start_s) is not None:
        starts = (
            f"the start{'s' if runs > 1 else ''} about {all_of(lambda number: minutes(number * start_s))}"
        )
        return f"{what}; {starts}, and the load, which was not measured here yet"
    return f"{what}; how long is not known: nothing was measured here yet"


def replay_plan(setup: Setup, replays: int, at_once: int, folder: Path) -> str:
    """Return the plan as text: `9 replays without a model, 2 at a time, no engine start ..`."""
    what = (
        f"{replays} replay{'s' if replays > 1 else ''} without a model, {at_once} at a time, no engine start"
    )
    each = replay_seconds(setup, folder)
    if each is None:
        return f"{what}; how long is known after the first"
    return f"{what}; about {minutes(replays * each / at_once)}: a replay of this load takes {each:.0f} s here"


def replay_seconds(setup: Setup, folder: Path) -> float | None:
    """Return the mean seconds of a replay in the folder's newest study of this model and load, or None without one."""
    from kvtune.answers.tune.study import read_study
    from kvtune.base.errors import KvtuneError

    for path in sorted(folder.glob("*.jsonl"), key=lambda p: p.stat().st_mtime, reverse=True)[:JOURNALS]:
        try:
            study = read_study(path)
        except KvtuneError:
            continue
        if (study.setup.model, study.setup.load.hash) == (setup.model, setup.load.hash):
            took = [trial.elapsed_s for trial in study.trials if trial.on == "sim" and trial.elapsed_s > 0]
            if took:
                return mean(took)
    return None


def announce_study(
    setup: Setup, workload: Workload, folder: Path, *, replays: int, runs: int, fewest: int = 0
) -> None:
    """Print a search's plan: its replays and engine runs. `fewest`: `runs` is an upper limit, `replays` a lower one."""
    from kvtune.lab.sim.simulators import replays_at_once

    say_loss(workload)
    if replays:
        plan = replay_plan(setup, replays, min(replays, replays_at_once()), folder)
        announce(f"{'at least ' if fewest else ''}{plan}")
    if runs:
        from kvtune.lab.device.settings import Timed

        source = "host" if isinstance(setup.device, Timed) else "engine"
        announce(engine_plan(setup.model, workload, runs, folder, fewest=fewest, source=source))


def announce(text: str) -> None:
    print(f"plan: {text}", file=sys.stderr, flush=True)
