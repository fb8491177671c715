"""Before work that takes long: what will run, how many engines start, about how long. On stderr, at once."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from kvtune.analysis.study import Bench
from kvtune.run.durations import known_durations
from kvtune.units import count, size
from kvtune.workload.types import Workload

if TYPE_CHECKING:
    from kvtune.tune.space.model import ModelFacts

JOURNALS = 10
"""How many of the newest studies are searched for the time that a replay of the load took."""


def begin(text: str) -> None:
    """Print the current task, before there is anything to show."""
    print(f"{text} ..", file=sys.stderr, flush=True)


def say_device(like_device: str) -> None:
    """Print which device's engine is simulated, and its chunk, seats and blocks without flags."""
    from kvtune.engine.platform import engines
    from kvtune.vllm.platforms import defaults

    platform = engines(like_device)
    take = defaults(platform)
    what = (
        f"as on {platform.title}: without flags {count(int(take['max_num_batched_tokens'].value))} tokens and "
        f"{count(int(take['max_num_seqs'].value))} requests in a step, blocks of {take['block_size'].value} tokens"
    )
    if platform.memory_bytes:
        used = f"what vLLM uses of {size(platform.memory_bytes)}, less the weights"
        other = f"; a pool that neither a flag nor the model sizes: {used}"
    else:
        other = "; --like-device h100 simulates a GPU's engine" if not like_device else ""
    print(f"{what}{other}", file=sys.stderr, flush=True)


def say_unknown(model: str, facts: ModelFacts) -> None:
    """Print that the search knows nothing of the model's windows and states, and why."""
    if facts.unknown:
        print(
            f"{model}: windows and states are not known, so only what suits every model is searched, the core's "
            f"defaults among it: {facts.unknown}",
            file=sys.stderr,
            flush=True,
        )


def minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def engine_plan(
    model: str, workload: Workload, runs: int, folder: Path, *, most: bool = False, source: str = "engine"
) -> str:
    """`2 engine runs of rounds (36 requests) ..`. `most`: fewer may be enough. `source`: engine or host."""
    known = known_durations(folder, model, workload.hash, source)
    what = (
        f"{'up to ' if most else ''}{runs} engine run{'s' if runs > 1 else ''} of {workload.name} "
        f"({count(len(workload.requests))} requests), {runs} engine start{'s' if runs > 1 else ''}"
    )
    if known.run_s is not None:
        return (
            f"{what}; about {minutes(runs * known.run_s)}: a run of this load takes {known.run_s:.0f} s here"
        )
    if known.start_s is not None:
        starts = f"the start{'s' if runs > 1 else ''} about {minutes(runs * known.start_s)}"
        return f"{what}; {starts}, and the load, which was not measured here yet"
    return f"{what}; how long is not known: nothing was measured here yet"


def replay_plan(bench: Bench, replays: int, at_once: int, folder: Path) -> str:
    """`9 replays, 2 at a time, no engine start ..`."""
    what = (
        f"{replays} replay{'s' if replays > 1 else ''} without a model, {at_once} at a time, no engine start"
    )
    each = replay_seconds(bench, folder)
    if each is None:
        return f"{what}; how long is known after the first"
    return f"{what}; about {minutes(replays * each / at_once)}: a replay of this load takes {each:.0f} s here"


def replay_seconds(bench: Bench, folder: Path) -> float | None:
    """How long replays of this model and load took in the newest study of them in the folder."""
    from kvtune.errors import KvtuneError
    from kvtune.tune.study import read_study

    for path in sorted(folder.glob("*.jsonl"), key=lambda p: p.stat().st_mtime, reverse=True)[:JOURNALS]:
        try:
            study = read_study(path)
        except KvtuneError:
            continue
        if (study.bench.model, study.bench.workload_hash) == (bench.model, bench.workload_hash):
            took = [trial.elapsed_s for trial in study.trials if trial.on == "sim" and trial.elapsed_s > 0]
            if took:
                return mean(took)
    return None


def announce_study(
    bench: Bench, workload: Workload, folder: Path, *, replays: int, runs: int, most: bool = False
) -> None:
    """Print a search's plan: the replays, and at most `most` engine runs."""
    from kvtune.sim.simulators import replays_at_once

    if replays:
        announce(replay_plan(bench, replays, min(replays, replays_at_once()), folder))
    if runs:
        announce(engine_plan(bench.model, workload, runs, folder, most=most))


def announce(text: str) -> None:
    print(f"plan: {text}", file=sys.stderr, flush=True)
