"""The same workload with each switch of the core and each setting of the collector turned over, interleaved.

Runs in the CLI's process. Every repeat goes through all variants before the next begins, in an order that turns round:
a machine that slows down slows all of them. A journal beside the run files lets a call that was cut off go on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Any

from kvtune.core.settings import KNOBS, LEGACY, CoreSettings
from kvtune.engine.messages import Event
from kvtune.engine.profile import ProfileJob, profile
from kvtune.errors import EXIT_INTERRUPTED, KvtuneError, UsageError
from kvtune.run.rows import add_row, read_rows

BASELINE = "baseline"
THRESHOLDS = (20_000, 50, 100)
"""What `thresholds` sets: collections some thirty times rarer than Python's own 700, 10, 10."""
NAMED_ONLY = ("whole_states", "packed")
"""Switches of models with state-space layers, and those of `legacy_`: turned over for those who ask for them."""
JOURNAL = "ablation.jsonl"


@dataclass(frozen=True, slots=True)
class Variant:
    """The baseline with one thing turned over. `settings` are core settings on top of the job's own."""

    name: str
    settings: dict[str, Any]
    turned: str  # "off", "on": what the variant does to it; "" for the baseline


@dataclass(slots=True)
class Made:
    """What came of a variant's runs: their files, and why others failed."""

    files: list[Path] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Ablated:
    """By variant, in their order. `why` is what ended it early: "interrupted", the budget; "" when nothing did."""

    made: dict[str, Made]
    planned: int
    why: str


@dataclass(frozen=True, slots=True)
class AblationProgress:
    """Before each run: its number, how many there are, the seconds of those made so far, and of all that are left."""

    name: str
    number: int
    total: int
    run_s: float | None
    left_s: float | None


def variants(job: ProfileJob, only: tuple[str, ...] = ()) -> tuple[Variant, ...]:
    """The baseline, each switch (some only when named), the thresholds. UsageError for a name that is none."""
    if job.core != "kvtune":
        raise UsageError("--ablate turns the core's switches over, --core stock has none", "leave out --core")
    now = {**CoreSettings().to_dict(), **job.core_settings}
    found = [
        Variant(name, {name: not now[name]}, "off" if now[name] else "on")
        for name, knob in KNOBS.items()
        if knob.kind == "switch"
    ]
    names = ("gc_threshold0", "gc_threshold1", "gc_threshold2")
    given = any(now[name] for name in names)
    values = (0, 0, 0) if given else THRESHOLDS
    found.append(Variant("thresholds", dict(zip(names, values, strict=True)), "off" if given else "on"))
    unknown = set(only) - {v.name for v in found}
    if unknown:
        raise UsageError(
            f"--ablate-only {', '.join(sorted(unknown))} names no switch",
            f"it takes {', '.join(v.name for v in found if not v.name.startswith(LEGACY))}",
        )
    kept = only or tuple(v.name for v in found if not v.name.startswith((LEGACY, *NAMED_ONLY)))
    return (Variant(BASELINE, {}, ""), *(v for v in found if v.name in kept))


def order(count: int, repeats: int) -> Iterator[tuple[int, int]]:
    """(repeat, variant): every second repeat is the one before backwards, each pair of repeats begins elsewhere."""
    for repeat in range(repeats):
        row = [(i + repeat // 2) % count for i in range(count)]
        for variant in reversed(row) if repeat % 2 else row:
            yield repeat, variant


def folder_of(job: ProfileJob) -> Path:
    """Where this job's runs and journal lie: the same command finds the same folder, other work another one."""
    what = json.dumps(
        [job.model, job.workload.hash, job.core_settings, job.dummy, list(job.engine_args), job.environment],
        sort_keys=True,
    )
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
    """Every run that the folder's journal does not hold yet. `on_start` hears what comes and gives who hears events.

    A run that fails is told and left out; without a baseline there is nothing to compare with, so its first failure
    ends all. `budget_s`: no run is begun that would, as the others went, end after it (0: all are made).
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
        told = AblationProgress(
            variant.name, number, len(plan), mean, mean * left if mean is not None else None
        )
        try:
            file = _run(job, variant, folder, on_start(told))
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
    """All is made and told: the same command begins anew the next time. The run files stay."""
    (folder_of(job) / JOURNAL).unlink(missing_ok=True)


def known(job: ProfileJob, chosen: tuple[Variant, ...], repeats: int) -> tuple[int, float | None]:
    """How many runs of the plan the journal holds, and the mean of their seconds."""
    names, folder = {v.name for v in chosen}, folder_of(job)
    rows = [r for r in _journal(folder) if (folder / r["file"]).is_file()]
    held = {(r["variant"], r["repeat"]) for r in rows if r["variant"] in names and r["repeat"] < repeats}
    return len(held), sum(float(r["seconds"]) for r in rows) / len(rows) if rows else None


def _run(job: ProfileJob, variant: Variant, folder: Path, on_event: Callable[[Event], None]) -> Path:
    settings = {**job.core_settings, **variant.settings}
    done = profile(replace(job, core_settings=settings, probe="light", stacks=False, output=folder), on_event)
    if done.error is not None:
        raise done.error  # a part of a run is nothing to compare
    return done.path


def _journal(folder: Path) -> list[dict[str, Any]]:
    return read_rows(folder / JOURNAL, ("variant", "repeat", "file", "seconds"))
