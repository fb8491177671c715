"""A load through the schedulers of two versions, each in a simulator of its own environment; and where they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from kvtune.analysis.latency import waits_ms
from kvtune.diff.result import Load, Parting, Replayed
from kvtune.engine.setup import Setup
from kvtune.errors import KvtuneError
from kvtune.explain.explanation import add_up
from kvtune.lab import Lab
from kvtune.run.types import Run
from kvtune.sim.simulators import Simulators
from kvtune.tally import Tally
from kvtune.vllm.changes import changes
from kvtune.vllm.environments import Environment
from kvtune.workload.types import Workload

COMPOSITION = ("requests", "scheduled_tokens", "prefill_tokens", "preempted")
"""What a step is made of."""
DECIDED_BY = {"request": ("pool",), "step": ("decode",)}
"""The parts of vLLM (kvtune/vllm/symbols.py) that decide what hits, and what a step is made of."""


def replayed(
    lab: Lab,
    environments: Sequence[Environment],
    sites: Sequence[str],
    setup: Setup,
    workload: Workload,
    spec: str,
) -> Load:
    """Replay the load in both environments at once. A version that cannot be simulated is said in `failed`.

    `sites`: the folders of their vLLM.
    """
    with ExitStack() as stack:
        opened = []
        for environment in environments:
            interpreter = stack.enter_context(environment.interpreter())
            opened.append(stack.enter_context(lab.simulators_of(interpreter, setup.platform)))
        for bench in opened:
            bench.submit(0, setup.replayed(verdicts=True).with_load(workload))
        old, new = outcomes = [_outcome(bench) for bench in opened]
    parted: list[Parting] = []
    if isinstance(old, Run) and isinstance(new, Run):
        parted = list(partings(old, new, *map(Path, sites)))
    return Load(
        workload=spec,
        model=setup.model,
        old=summed(old) if isinstance(old, Run) else None,
        new=summed(new) if isinstance(new, Run) else None,
        partings=parted,
        failed=[
            f"{environment.name}: {outcome.message}"
            for environment, outcome in zip(environments, outcomes, strict=True)
            if isinstance(outcome, KvtuneError)
        ],
    )


def _outcome(bench: Simulators) -> Run | KvtuneError:
    try:
        return bench.next_done()[1]
    except KvtuneError as error:
        return error


def summed(run: Run) -> Replayed:
    sums, steps, requests = add_up(run, run), run.table("steps"), run.table("requests")
    prefill, scheduled = (int(steps[name].sum()) for name in ("prefill_tokens", "scheduled_tokens"))
    rest_ms = 1000 * (requests["finished_s"] - requests["first_token_s"])
    return Replayed(
        **structs.asdict(Tally.sum([sums.prefix_cache])),
        preemptions=sums.preemptions,
        computed_twice=sum(sum(causes.values()) for causes in sums.computed_twice.values()),
        steps=len(steps["t_s"]),
        step_requests=_mean(steps["requests"].astype(float)),
        prefill_tokens=prefill,
        decode_tokens=scheduled - prefill,
        first_ms=_mean(waits_ms(requests)),
        gap_ms=_mean(
            rest_ms / np.where(requests["output_tokens"] > 1, requests["output_tokens"] - 1.0, np.nan)
        ),
    )


def _mean(values: NDArray[np.float64]) -> float:
    known = values[np.isfinite(values)]
    return round(float(known.mean()), 3) if len(known) else 0.0


def partings(old: Run, new: Run, old_site: Path, new_site: Path) -> Iterator[Parting]:
    """Yield the first request whose hits differ, and the first step that is made of something else.

    The symbols are of vLLM's layout of blocks where the blocks' sizes differ.
    """
    layout = old.header.engine.block_size != new.header.engine.block_size
    for what, table, columns in (("request", "requests", ("hit_tokens",)), ("step", "steps", COMPOSITION)):
        sides = (
            zip(*(run.table(table)[name].tolist() for name in columns), strict=True) for run in (old, new)
        )
        pairs = enumerate(zip_longest(*sides), 1)
        number, differing = next(((n, pair) for n, pair in pairs if pair[0] != pair[1]), (0, ()))
        if number:
            was, now = (_words(columns, values) for values in differing)
            parts = ("layout",) if layout else DECIDED_BY[what]
            symbols = sorted({name for name, _, _ in changes(old_site, new_site, parts)})
            yield Parting(what=what, number=number, old=was, new=now, symbols=symbols)


def _words(columns: Sequence[str], values: Sequence[int] | None) -> str:
    if values is None:
        return "none"
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in zip(columns, values, strict=True))
