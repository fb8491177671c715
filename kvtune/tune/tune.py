"""Tuning, start to recipe: stock on the engine, the search in simulation, finalists on the engine, the recipe."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtune.engine.flags import flag_value
from kvtune.errors import KvtuneError
from kvtune.recipe import Recipe, write_recipe
from kvtune.sim.cost import NOMINAL, StepCost, fit
from kvtune.tune import guard
from kvtune.tune.confirm import Bout, Confirmed, Contender, confirm
from kvtune.tune.effects import notes
from kvtune.tune.objective import Objective, axes, front, objective
from kvtune.tune.recipes.make import finalists, recipe_of, simulated_recipe
from kvtune.tune.search import search, tuned_space
from kvtune.tune.space.model import ModelFacts
from kvtune.tune.space.values import Settings
from kvtune.tune.trials.journal import StudyJournal
from kvtune.tune.trials.trial import Bench, Trial
from kvtune.workload.types import Workload

SCHEMA = 1
JOINED = "joined: what was simulated here is in the study; whoever began it confirms and writes the recipe"
COLLECTOR: tuple[Settings, ...] = ({"gc_threshold0": 20_000}, {"collect_at_wait": True})
"""What `--gc` tries on the engine with the best simulated settings; the heap is frozen there by default."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`trials` are simulated ones; `budget_s` bounds the engine's part (a round that has begun is finished)."""

    trials: int = 40
    finalists: int = 2
    rounds: int = 4
    budget_s: float = 600.0
    on_engine: bool = True
    guards: tuple[str, ...] = ()  # workloads on which no finalist may hit less than stock
    admission: bool = False  # also try admitting by cached prefix
    collector: bool = False  # also try settings of the garbage collector, which only an engine can judge


@dataclass(frozen=True, slots=True)
class Tuned:
    trials: tuple[Trial, ...]
    baseline: Trial | None
    best: Trial | None
    verdict: dict[str, Any]
    recipe: Path | None
    finalists: tuple[dict[str, Any], ...] = ()


def tune(
    bench: Bench,
    workload: Workload,
    facts: ModelFacts,
    by: Objective,
    journal: StudyJournal,
    limits: Limits,
    *,
    seed: int,
    output: Path,
    recipe: Path,
    say: Callable[[Trial], None],
    phase: Callable[[str], None],
    on_event: Callable[[Any], None] = lambda event: None,
    storage: str = "",
    join: bool = False,
) -> Tuned:
    """Search, confirm, write the recipe. No winner is a result: no recipe, and the verdict says why."""
    begun = time.monotonic()
    bout = Bout(bench, workload, journal, output, say, on_event)
    baseline = Contender({}, "baseline")
    cost = NOMINAL
    if limits.guards:
        phase("stock on the guards")
        guard.check(bench, limits.guards)
    if limits.on_engine and not join:
        phase("stock on the engine")
        if bout.run(baseline) is None:
            raise KvtuneError(f"stock vLLM failed: {baseline.failed}", "repair what stock needs first")
        cost = _fitted(baseline)
    phase("searching in simulation")
    given = {name: flag_value(bench.engine_args, name.replace("_", "-")) for name in _engine_names()}
    simulated = search(
        bench,
        tuned_space(facts, given, admission=limits.admission),
        by,
        journal,
        trials=limits.trials,
        seed=seed,
        cost=cost,
        say=say,
        storage=storage,
        join=join,
    )
    stock = next((t for t in simulated if t.role == "baseline"), None)
    best = finalists(simulated, by, limits.finalists)
    if limits.guards:
        phase("guards in simulation")
        asked = guard.candidates(finalists(simulated, by, guard.TRIED), simulated)
        best = guard.holding(bench, limits.guards, asked, cost, phase)[: limits.finalists]
    if join:
        return _done(journal, stock, best[0] if best else None, by, None, None, JOINED)
    if not best:
        why = (
            "no setting of the best held on the guards"
            if limits.guards
            else "no simulated trial was completed"
        )
        return _done(journal, stock, None, by, None, None, f"no winner: {why}" if limits.guards else why)
    if not limits.on_engine:
        return _simulated(bench, by, journal, stock, best[0], recipe, len(simulated))
    phase("finalists on the engine")
    sides = [Contender(t.settings, "trial") for t in best]
    if limits.collector:
        sides += [Contender({**best[0].settings, **more}, "trial") for more in COLLECTOR]
    left_s = max(0.0, limits.budget_s - (time.monotonic() - begun))
    found = confirm(bout, baseline, sides, by, rounds=limits.rounds, budget_s=left_s)
    if found.winner is not None:
        write_recipe(recipe_of(bench, by, found, found.winner, len(simulated)), recipe)
    return _judged(journal, found, by, recipe)


def _engine_names() -> tuple[str, ...]:
    from kvtune.tune.space.knobs import ENGINE_KNOBS

    return tuple(ENGINE_KNOBS)


def _fitted(baseline: Contender) -> StepCost:
    """This machine's step cost; nominal where the run was too short to fit one."""
    try:
        return fit(baseline.runs[0])
    except KvtuneError:
        return NOMINAL


def _simulated(
    bench: Bench,
    by: Objective,
    journal: StudyJournal,
    stock: Trial | None,
    best: Trial,
    recipe: Path,
    simulated: int,
) -> Tuned:
    mine = by.score(best.summary)
    theirs = by.score(stock.summary) if stock is not None else None
    if mine is None or theirs is None or stock is None or mine <= theirs:
        why = "no winner: nothing beat stock in simulation"
        return _done(journal, stock, best, by, None, None, why)
    made: Recipe = simulated_recipe(bench, by, best, stock, simulated)
    write_recipe(made, recipe)
    text = (
        f"{by.name} {by.of(best.summary):.4g} against stock's {by.of(stock.summary):.4g}, in simulation only"
    )
    return _done(journal, stock, best, by, None, recipe, text)


def _judged(journal: StudyJournal, found: Confirmed, by: Objective, recipe: Path) -> Tuned:
    best = found.leader.trials[-1] if found.leader is not None else None
    if found.winner is None:
        return _done(journal, found.baseline.trials[-1], best, by, found, None, f"no winner: {found.why}")
    figure = next(f for f in found.figures if f.path == by.path)
    text = f"{by.name} {figure.b:.4g} against stock's {figure.a:.4g} on the engine: {found.why}"
    return _done(journal, found.baseline.trials[-1], best, by, found, recipe, text)


def _done(
    journal: StudyJournal,
    baseline: Trial | None,
    best: Trial | None,
    by: Objective,
    found: Confirmed | None,
    recipe: Path | None,
    text: str,
) -> Tuned:
    from dataclasses import asdict

    verdict = {
        "winner": recipe is not None,
        "confirmed": found is not None and found.winner is not None,
        "objective": by.name,
        "objectives": list(by.names),
        "on": "engine" if found is not None else "sim",
        "text": text,
        "drift_ttft": found.drift if found is not None else None,
        "engine_runs": {
            "baseline": len(found.baseline.runs) if found else 0,
            "leader": len(found.leader.runs) if found and found.leader else 0,
        },
        "figures": [asdict(f) for f in found.figures] if found is not None else [],
    }
    sides = tuple(_finalist(found, side) for side in found.finalists) if found is not None else ()
    return Tuned(tuple(journal.trials), baseline, best, verdict, recipe, sides)


def _finalist(found: Confirmed, side: Contender) -> dict[str, Any]:
    from dataclasses import asdict

    from kvtune.analysis.comparison.repeats import compare_repeats

    figures = compare_repeats(found.baseline.runs, side.runs).figures if side.runs else ()
    return {
        "settings": side.settings,
        "winner": side is found.winner,
        "failed": side.failed,
        "trials": [t.number for t in side.trials],
        "run_files": [t.run_file for t in side.trials if t.run_file],
        "figures": [asdict(f) for f in figures],
    }


def plain(tuned: Tuned) -> dict[str, Any]:
    """The `--json` object; `pareto`: numbers of the trials on the front, of the engine's where there are any."""
    place = tuned.verdict["on"]
    by = objective(",".join(tuned.verdict["objectives"]))
    return {
        "schema": SCHEMA,
        "kind": "tune",
        "objective": tuned.verdict["objective"],
        "objectives": tuned.verdict["objectives"],
        "trials": [t.plain() for t in tuned.trials],
        "best": tuned.best.plain() if tuned.best else None,
        "baseline": tuned.baseline.plain() if tuned.baseline else None,
        "finalists": list(tuned.finalists),
        "pareto": [t.number for t in front([t for t in tuned.trials if t.on == place], axes(by))],
        "verdict": tuned.verdict,
        "recipe": str(tuned.recipe) if tuned.recipe else None,
        "notes": notes(tuned.trials),
    }
