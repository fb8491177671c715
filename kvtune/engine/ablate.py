"""The same workload with each switch of the core and each setting of the collector turned over, interleaved.

Runs in the CLI's process. Every repeat goes through all variants before the next begins, in an order that turns round:
a machine that slows down slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvtune.core.settings import KNOBS, LEGACY, CoreSettings
from kvtune.engine.plan import Event
from kvtune.engine.profile import Job, Profiled, profile
from kvtune.errors import UsageError

BASELINE = "baseline"
THRESHOLDS = (20_000, 50, 100)
"""What `thresholds` sets: collections some thirty times rarer than Python's own 700, 10, 10."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The baseline with one thing turned over. `settings` are core settings on top of the job's own."""

    name: str
    settings: dict[str, Any]
    turned: str  # "off", "on": what the variant does to it; "" for the baseline


def variants(job: Job, only: tuple[str, ...] = ()) -> tuple[Variant, ...]:
    """The baseline, each switch (legacy ones when named), the thresholds. UsageError for a name that is none."""
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
            f"it takes {', '.join(v.name for v in found)}",
        )
    # What vLLM no longer does is worth a run only to those who ask for it.
    kept = only or tuple(v.name for v in found if not v.name.startswith(LEGACY))
    return (Variant(BASELINE, {}, ""), *(v for v in found if v.name in kept))


def order(count: int, repeats: int) -> Iterator[tuple[int, int]]:
    """(repeat, variant) with each repeat's variants in a rotated order, every second one backwards."""
    for repeat in range(repeats):
        row = [(i + repeat) % count for i in range(count)]
        for variant in reversed(row) if repeat % 2 else row:
            yield repeat, variant


def ablate(
    job: Job,
    chosen: tuple[Variant, ...],
    repeats: int,
    on_start: Callable[[str, int, int], Callable[[Event], None]],
    on_end: Callable[[Variant, Profiled], None] = lambda variant, done: None,
) -> dict[str, list[Profiled]]:
    """Runs by variant. `on_start` gets what runs, its number and how many there are, and gives who hears events.

    A run that fails is left out; the others go on.
    """
    found: dict[str, list[Profiled]] = {v.name: [] for v in chosen}
    total = len(chosen) * repeats
    for number, (_, at) in enumerate(order(len(chosen), repeats), start=1):
        variant = chosen[at]
        settings = {**job.core_settings, **variant.settings}
        done = profile(
            replace(job, core_settings=settings, probe="light"), on_start(variant.name, number, total)
        )
        on_end(variant, done)
        if done.error is None:
            found[variant.name].append(done)
        elif done.error.exit_code == 130:
            break
    return found
