"""Guards: other workloads that tuned settings must not hurt. Candidates and stock are replayed on each guard.

Runs in the simulator with the set-up's model, flags and pool. A candidate passes if its hit rate is at most MARGIN
below stock's. Replays of guards take seconds and are not journalled: a resumed study makes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtune.answers.tune.objective import OBJECTIVES
from kvtune.answers.tune.result import Settings, Trial
from kvtune.answers.tune.trials.run import STOCK, PlannedTrial, Trials
from kvtune.base.errors import UsageError
from kvtune.lab.lab import LAB, Lab
from kvtune.lab.setup.resolve import tokenizer_of
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.spec import build

MARGIN = 0.01
TRIED = 16
"""At most this many candidates are replayed, the best first."""


def candidates(ranked: Sequence[Trial], simulated: Sequence[Trial]) -> list[Trial]:
    """Return the best trials, and the core's defaults as a fallback if every tuned setting hurts a guard."""
    chosen = list(ranked[:TRIED])
    defaults = [t for t in simulated if t.role == "trial" and not t.settings and t.state == "complete"]
    return chosen + [t for t in defaults if t not in chosen]


def check(setup: Setup, guards: Sequence[str], lab: Lab = LAB) -> None:
    """Raise UsageError for a guard that stock cannot run. Fast, so call it before the search."""
    for spec in guards:
        hit_rates(setup, spec, [], lab)


def holding(
    setup: Setup,
    guards: Sequence[str],
    trials: Sequence[Trial],
    say: Callable[[str], None],
    lab: Lab = LAB,
) -> list[Trial]:
    """Return the trials that pass every guard, in the same order."""
    alive = list(trials)
    for spec in guards:
        if not alive:
            break
        stock, rates = hit_rates(setup, spec, [t.settings for t in alive], lab)
        held = [
            t for t, rate in zip(alive, rates, strict=True) if rate is not None and rate >= stock - MARGIN
        ]
        say(
            f"guard {spec}: {len(held)} of {len(alive)} hit no more than a point below stock's {100 * stock:.1f} %"
        )
        alive = held
    return alive


def hit_rates(
    setup: Setup, spec: str, settings: Sequence[Settings], lab: Lab = LAB
) -> tuple[float, list[float | None]]:
    """Return the hit rates of stock and of each of the settings on workload `spec`; None for a failed replay.

    UsageError if stock cannot run it.
    """
    work = build(spec, seed=setup.load.seed, tokenizer=tokenizer_of(setup.model, setup.engine_args))
    with Trials(setup.replayed().with_load(work), lab=lab) as trials:
        made = trials.run([STOCK, *map(PlannedTrial, settings)])
    rate = OBJECTIVES["hit-rate"]
    stock, *rates = [None if trial.state == "failed" else rate.of(trial.summary) for trial in made]
    if stock is None:
        raise UsageError(
            f"stock cannot run the guard {spec} with this pool",
            "give a smaller workload or a larger pool, or leave the guard out",
        )
    return stock, rates
