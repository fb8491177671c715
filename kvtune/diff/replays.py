"""A load through the schedulers of two versions, each in a simulator of its own environment; and where they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvtune.diff.environments import Environment
from kvtune.diff.result import Load, Parting, Replayed
from kvtune.engine.setup import Setup
from kvtune.errors import KvtuneError
from kvtune.explain.explanation import add_up
from kvtune.lab import Lab
from kvtune.run.types import Run
from kvtune.vllm.changes import changes
from kvtune.vllm.symbols import PARTS
from kvtune.workload.types import Workload

COMPOSITION = ("requests", "scheduled_tokens", "prefill_tokens", "preempted")
"""What a step is made of."""


def replayed(
    lab: Lab,
    environments: Sequence[Environment],
    sites: Sequence[str],
    setup: Setup,
    workload: Workload,
    spec: str,
) -> Load:
    """Replay the load in both environments at once. A version that cannot be simulated is said in `failed`."""
    outcomes: list[Run | KvtuneError] = []
    with ExitStack() as stack:
        opened = []
        for one in environments:
            interpreter = stack.enter_context(one.interpreter())
            opened.append(stack.enter_context(lab.simulators_of(interpreter, setup.platform)))
        for bench in opened:
            bench.submit(0, setup.replayed(verdicts=True).with_load(workload))
        for bench in opened:
            try:
                outcomes.append(bench.next_done()[1])
            except KvtuneError as error:
                outcomes.append(error)
    old, new = outcomes
    failed = [
        f"{environment.name}: {outcome.message}"
        for environment, outcome in zip(environments, outcomes, strict=True)
        if isinstance(outcome, KvtuneError)
    ]
    found: list[Parting] = []
    if isinstance(old, Run) and isinstance(new, Run):
        found = list(partings(old, new))
    return Load(
        workload=spec,
        model=setup.model,
        old=_summed(old),
        new=_summed(new),
        partings=found,
        symbols=_symbols(*map(Path, sites)) if found else [],
        failed=failed,
    )


def _summed(run: Run | KvtuneError) -> Replayed | None:
    if isinstance(run, KvtuneError):
        return None
    told = add_up(run, run)
    return Replayed(
        prompt_tokens=told.query_tokens,
        hit_tokens=told.hit_tokens,
        misses={cause: tokens for cause, tokens in told.misses.items() if tokens},
        preemptions=told.preemptions,
        computed_twice=sum(sum(causes.values()) for causes in told.computed_twice.values()),
        steps=len(run.table("steps")["t_s"]),
    )


def partings(old: Run, new: Run) -> Iterator[Parting]:
    """Yield the first request whose hits differ, and the first step that is made of something else."""
    for what, table, columns in (("request", "requests", ("hit_tokens",)), ("step", "steps", COMPOSITION)):
        rows = [
            list(zip(*(run.table(table)[name].tolist() for name in columns), strict=True))
            for run in (old, new)
        ]
        for number, (was, now) in enumerate(zip(*rows, strict=False)):
            if was != now:
                yield Parting(
                    what=what, number=number + 1, old=_words(columns, was), new=_words(columns, now)
                )
                break
        else:
            if len(rows[0]) != len(rows[1]):
                last = min(map(len, rows)) + 1
                was, now = (f"{len(side)} {what}s in all" for side in rows)
                yield Parting(what=what, number=last, old=was, new=now)


def _words(columns: Sequence[str], values: Sequence[int]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in zip(columns, values, strict=True))


def _symbols(old: Path, new: Path) -> list[str]:
    """Return which known symbols of vLLM's scheduler and cache changed between two site-packages."""
    return sorted(name for name, _, _ in changes(old, new, tuple(PARTS)) if name.startswith("vllm.v1.core."))
