"""Ablation: the same workload with each switch of the core, and the collector's thresholds, flipped in turn.

Runs in the CLI's process. Variants are interleaved: each repeat runs all of them, in alternating order, so that a
machine that slows down affects all. A journal beside the run files lets an interrupted command resume.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from kvtune.core.settings import KNOBS, CoreSettings
from kvtune.engine.messages import Event
from kvtune.engine.profile import ProfileJob, profile
from kvtune.errors import EXIT_INTERRUPTED, KvtuneError, UsageError
from kvtune.legal import Value
from kvtune.run.rows import add_row, read_rows

BASELINE = "baseline"
THRESHOLDS = (20_000, 50, 100)
"""The variant `thresholds`: about thirty times fewer collections than with Python's defaults (700, 10, 10)."""
NAMED_ONLY = ("whole_states", "packed", "strict")
"""Switches for models with state-space layers, and for how the core loads: flipped only on request."""
JOURNAL = "ablation.jsonl"


@dataclass(frozen=True, slots=True)
class Variant:
    """The baseline with one setting flipped. `settings` override the job's core settings."""

    name: str
    settings: dict[str, Value]
    turned: str  # "off" or "on"; "" for the baseline


@dataclass(slots=True)
class Made:
    """A variant's run files, and the errors of its failed runs."""

    files: list[Path] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ablated:
    """Runs by variant, in order. `why` says what ended it early (interrupted, the budget), "" when nothing did."""

    made: dict[str, Made]
    planned: int
    why: str


@dataclass(frozen=True, slots=True)
class AblationProgress:
    """Before each run: its number and the total; the mean seconds of a run so far, and the seconds left for all."""

    name: str
    number: int
    total: int
    run_s: float | None
    left_s: float | None


def variants(job: ProfileJob, only: tuple[str, ...] = ()) -> tuple[Variant, ...]:
    """The baseline, each switch (some only when named), the thresholds. UsageError for an unknown name."""
    if job.core != "kvtune":
        raise UsageError(
            "--ablate flips the switches of kvtune's core, and --core stock has none", "leave out --core"
        )
    now = {**CoreSettings().to_dict(), **job.core_settings}
    every = [
        Variant(name, {name: not now[name]}, "off" if now[name] else "on")
        for name, knob in KNOBS.items()
        if knob.kind == "switch"
    ]
    names = ("gc_threshold0", "gc_threshold1", "gc_threshold2")
    given = any(now[name] for name in names)
    values = (0, 0, 0) if given else THRESHOLDS
    every.append(Variant("thresholds", dict(zip(names, values, strict=True)), "off" if given else "on"))
    unknown = set(only) - {v.name for v in every}
    if unknown:
        raise UsageError(
            f"--ablate-only: unknown switch {', '.join(sorted(unknown))}",
            f"it takes {', '.join(v.name for v in every)}",
        )
    kept = only or tuple(v.name for v in every if v.name not in NAMED_ONLY)
    return (Variant(BASELINE, {}, ""), *(v for v in every if v.name in kept))


def order(count: int, repeats: int) -> Iterator[tuple[int, int]]:
    """(repeat, variant): every second repeat reverses the one before; each pair starts at another variant."""
    for repeat in range(repeats):
        row = [(i + repeat // 2) % count for i in range(count)]
        for variant in reversed(row) if repeat % 2 else row:
            yield repeat, variant


def folder_of(job: ProfileJob) -> Path:
    """The folder of this job's runs and journal: the same for the same command, another for other work."""
    work = [
        job.model,
        job.workload.hash,
        job.core_settings,
        job.dummy,
        list(job.engine_args),
        job.environment,
    ]
    if job.device is not None:
        work.append(msgspec.to_builtins(job.device))
    what = json.dumps(work, sort_keys=True)
    name = f"ablation_{Path(job.model).name or 'model'}_{job.workload.name}"
    return job.output / f"{name}_{sha256(what.encode()).hexdigest()[:8]}"


def ablate(
    job: ProfileJob,
    chosen: tuple[Variant, ...],
    repeats: int,
    on_start: Callable[[AblationProgress], Callable[[Event], None]],
    *,
    budget_s: float = 0.0,
    clock: Callable[[], float] = monotonic,
) -> Ablated:
    """Make every run that the folder's journal does not list. `on_start` gets the progress, returns an event handler.

    A failed run is recorded and left out, but the baseline's first failure is raised: without it nothing can be
    compared. `budget_s`: a run that would end after it, judged by the mean run so far, is not started (0: no limit).
    """
    folder = folder_of(job)
    made = {v.name: Made() for v in chosen}
    kept = _journal(folder)
    plan = [(repeat, chosen[at]) for repeat, at in order(len(chosen), repeats)]
    rows = {(r["variant"], r["repeat"]): r for r in kept if (folder / r["file"]).is_file()}
    seconds = [float(r["seconds"]) for r in rows.values()]
    began = clock()
    why = ""
    for number, (repeat, variant) in enumerate(plan, start=1):
        row = rows.get((variant.name, repeat))
        if row is not None:
            made[variant.name].files.append(folder / row["file"])
            continue
        mean = sum(seconds) / len(seconds) if seconds else None
        left = sum((v.name, r) not in rows for r, v in plan[number - 1 :])
        if budget_s and clock() - began + (mean or 0.0) > budget_s:
            why = f"the budget of {budget_s / 60:g} min is used up"
            break
        start = clock()
        progress = AblationProgress(
            variant.name, number, len(plan), mean, mean * left if mean is not None else None
        )
        try:
            file = _run(job, variant, folder, on_start(progress))
        except (KvtuneError, KeyboardInterrupt) as error:
            if isinstance(error, KeyboardInterrupt) or error.exit_code == EXIT_INTERRUPTED:
                why = "interrupted"
                break
            if variant.name == BASELINE and not made[BASELINE].files:
                raise
            made[variant.name].failed.append(error.message)
            continue
        seconds.append(clock() - start)
        row = {"variant": variant.name, "repeat": repeat, "file": file.name, "seconds": round(seconds[-1], 1)}
        add_row(folder / JOURNAL, row)
        made[variant.name].files.append(file)
    return Ablated(made, len(plan), why)


def ended(job: ProfileJob) -> None:
    """Remove the journal: the same command starts from the beginning next time. The run files stay."""
    folder = folder_of(job)
    _journal(folder)
    (folder / JOURNAL).unlink(missing_ok=True)


def known(job: ProfileJob, chosen: tuple[Variant, ...], repeats: int) -> tuple[int, float | None]:
    """The number of the plan's runs that the journal lists, and their mean duration in seconds."""
    names, folder = {v.name for v in chosen}, folder_of(job)
    rows = [r for r in _journal(folder) if (folder / r["file"]).is_file()]
    held = {(r["variant"], r["repeat"]) for r in rows if r["variant"] in names and r["repeat"] < repeats}
    return len(held), sum(float(r["seconds"]) for r in rows) / len(rows) if rows else None


def _run(job: ProfileJob, variant: Variant, folder: Path, on_event: Callable[[Event], None]) -> Path:
    settings = {**job.core_settings, **variant.settings}
    done = profile(replace(job, core_settings=settings, probe="light", stacks=False, output=folder), on_event)
    if done.error is not None:
        raise done.error  # a partial run is not comparable
    return done.path


def _journal(folder: Path) -> list[dict[str, Any]]:
    """The journal of this folder's runs. The baseline's first run file is written again with the result."""
    rows = read_rows(folder / JOURNAL, ("variant", "repeat", "file", "seconds"))
    return [row for row in rows if Path(row["file"]).name == row["file"]]
