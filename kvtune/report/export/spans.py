"""A run as nested spans of time per process, for both trace exports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvtune.run.types import Run

PHASES = ("schedule", "execute", "update")
FACTS = (
    "scheduled_tokens",
    "prefill_tokens",
    "requests",
    "running",
    "waiting",
    "free_blocks",
    "context_tokens",
)


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A named span, in microseconds on the run's clock. `args`: figures for its tooltip."""

    name: str
    start_us: float
    end_us: float
    args: Mapping[str, float] = field(default_factory=dict)


def step_spans(run: Run, process: int) -> Iterator[TimeSpan]:
    """Yield the steps of one process in order of time, each followed by its phases.

    With a batch queue, schedule and update of a step belong to different batches. The order and durations of the
    phases are exact; the time between them is not recorded.
    """
    steps = run.table("steps")
    rows = [int(i) for i in (steps["process"] == process).nonzero()[0]]
    for i in sorted(rows, key=lambda row: float(steps["t_s"][row])):
        start = float(steps["t_s"][i]) * 1e6
        end = start + float(steps["step_us"][i])
        yield TimeSpan("step", start, end, {name: int(steps[name][i]) for name in FACTS})
        at = start
        for phase in PHASES:
            until = min(end, at + float(steps[f"{phase}_us"][i]))
            if until > at:
                yield TimeSpan(phase, at, until)
            at = until


def collection_spans(run: Run, process: int) -> Iterator[TimeSpan]:
    """Yield the garbage collections of one process in order of time. The column `t_s` is their start."""
    gc = run.table("gc")
    rows = [int(i) for i in (gc["process"] == process).nonzero()[0]]
    for i in sorted(rows, key=lambda row: float(gc["t_s"][row])):
        start = float(gc["t_s"][i]) * 1e6
        facts = {"collected": int(gc["collected"][i]), "uncollectable": int(gc["uncollectable"][i])}
        yield TimeSpan(f"gc generation {gc['generation'][i]}", start, start + float(gc["pause_us"][i]), facts)


def process_numbers(run: Run) -> list[int]:
    """Return the numbers of all processes in the run's header or in its tables."""
    numbers = set(range(len(run.header.processes)))
    for name in ("steps", "gc", "memory"):
        numbers.update(int(p) for p in set(run.table(name)["process"].tolist()))
    return sorted(numbers)
