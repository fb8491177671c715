"""A sweep: stock and the chosen settings, each a trial; and what comes of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from kvtune.answers.tune.effects import notes
from kvtune.answers.tune.objective import OBJECTIVES, Objective, axes, front
from kvtune.answers.tune.result import Finalist, Kind, Outcome, Place, Settings, StudyResult, Trial
from kvtune.answers.tune.ties import best
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.trials.run import STOCK, PlannedTrial, Trials
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.units import count
from kvtune.data.recipe import read_recipe
from kvtune.data.run.signature import refuse_foreign, signature, write_own
from kvtune.lab.lab import LAB, Lab
from kvtune.lab.setup.resolve import TOO_SMALL
from kvtune.lab.setup.setup import Setup

LARGER = (1.25, 1.5, 2.0, 4.0, 8.0)
"""If nothing hits, these multiples of the study's pool are tried."""


def planned_trials(setup: Setup, chosen: Sequence[Settings]) -> list[PlannedTrial]:
    """Return a sweep's trials: stock vLLM as the baseline, then the chosen settings. Defaults alone get no baseline."""
    tried = [PlannedTrial(settings, stock=setup.core == "stock") for settings in chosen]
    return tried if len(tried) == 1 and not tried[0].settings else [STOCK, *tried]


def run(
    setup: Setup,
    planned: Sequence[PlannedTrial],
    journal: StudyJournal,
    say: Callable[[Trial], None],
    lab: Lab = LAB,
    *,
    output: Path = Path(),
) -> None:
    """Run the trials that are not in the journal yet, where the set-up says.

    Raise KvtuneError if a replay of stock fails, or if the pool cannot hold one request, which no knob changes.
    """

    def failed(plan: PlannedTrial, error: KvtuneError) -> None:
        if plan.stock or error.message.startswith(TOO_SMALL):
            raise KvtuneError(error.message, error.hint)

    with Trials(setup, journal, say, lab, output=output, failed=failed) as trials:
        trials.run(planned)


def pool_that_hits(setup: Setup, trials: Sequence[Trial], lab: Lab = LAB) -> str:
    """If no setting hit anything in simulation, say which of some larger pools is the smallest with hits; else ""."""
    done = [t for t in trials if t.on == "sim" and t.state == "complete"]
    rates = [OBJECTIVES["hit-rate"].of(t.summary) for t in done]
    if not done or any(rates):
        return ""
    engine = done[0].summary["engine"]
    blocks = int(engine["num_blocks"])
    assumes = f" ({origin})" if (origin := engine.get("origins", {}).get("num_blocks")) else ""
    with Trials(setup.replayed(), lab=lab) as larger_pools:
        for times in LARGER:
            larger = int(blocks * times)
            plan = PlannedTrial({"num_gpu_blocks_override": larger}, stock=setup.core == "stock")
            if rate := OBJECTIVES["hit-rate"].of(larger_pools.run([plan])[0].summary):
                return (
                    f"no setting hits because the load does not fit: the pool has {count(blocks)} blocks{assumes}; "
                    f"with {count(larger)} the defaults of the {setup.core} core hit {100 * rate:.1f} % "
                    f"(`-- --num-gpu-blocks-override {larger}`)"
                )
    return f"no setting hits, nor do the defaults in a pool of {LARGER[-1]:g} times its {count(blocks)} blocks{assumes}"


def result(trials: Sequence[Trial], objective: Objective) -> StudyResult:
    """Return the result of the trials. The best is an engine trial if there are engine trials, else a simulated one."""
    place: Place = "engine" if any(t.on == "engine" for t in trials) else "sim"
    tried = sorted((t for t in trials if t.role == "trial"), key=lambda t: t.number)
    at_place = [t for t in trials if t.on == place]
    baseline = next((t for t in at_place if t.role == "baseline"), None)
    leader = best(at_place, objective)
    if baseline is None and len(tried) == 1:
        baseline = tried[0]
    verdict = outcome(leader, baseline, objective, place)
    made = study_result("sweep", trials, objective, verdict, best=leader, baseline=baseline)
    return msgspec.structs.replace(made, trials=tuple(tried))


def study_result(
    kind: Kind,
    trials: Sequence[Trial],
    objective: Objective,
    verdict: Outcome,
    *,
    best: Trial | None,
    baseline: Trial | None,
    finalists: tuple[Finalist, ...] = (),
    recipe: Path | None = None,
) -> StudyResult:
    """Return the result of a study. `pareto` has the trials of where the verdict is of: engine or simulator."""
    there = [t for t in trials if t.on == verdict.on]
    return StudyResult(
        kind=kind,
        objective=objective.name,
        objectives=objective.names,
        trials=tuple(trials),
        best=best,
        baseline=baseline,
        finalists=finalists,
        pareto=tuple(t.number for t in front(there, axes(objective))),
        verdict=verdict,
        recipe=str(recipe) if recipe else None,
        notes=tuple(notes(trials)) if objective.replayed else (),
    )


def outcome(leader: Trial | None, baseline: Trial | None, objective: Objective, place: Place) -> Outcome:
    """Compare the leader with stock: `winner` if it is better, never `confirmed`, as each ran only once."""
    figure = objective.of(leader.summary) if leader is not None else None
    if leader is None or figure is None:
        return Outcome(objective=objective.name, on=place, text="no trial was completed")
    if baseline is None or baseline.state != "complete" or (stock := objective.of(baseline.summary)) is None:
        text = f"{objective.name} {figure:.4g}; there is no baseline to compare with"
        return Outcome(objective=objective.name, on=place, best=figure, text=text)
    where = (
        "in simulation, not confirmed on the engine"
        if place == "sim"
        else "one engine run each, not repeated"
    )
    winner = baseline.number != leader.number and objective.better * (figure - stock) > 0
    text = f"{objective.name} {figure:.4g} against stock's {stock:.4g} ({where})"
    if not winner:
        text = f"no winner: {text}"
    return Outcome(winner=winner, objective=objective.name, on=place, best=figure, baseline=stock, text=text)


def fail_if_none(trials: Sequence[Trial]) -> None:
    """Raise KvtuneError with the first trial's cause if every trial failed."""
    tried = [t for t in trials if t.role == "trial"]
    if tried and all(t.state == "failed" for t in tried):
        raise KvtuneError(
            f"every trial failed: {tried[0].why}", "check the values, MODEL and the flags after `--`"
        )


RESULT = ".result.json"


def refuse_foreign_outputs(journal: Path, recipe: Path | None, owner: str, *, force: bool = False) -> None:
    """Raise UsageError if an output file exists that this study (`owner`: its identity) did not write."""
    for path in (journal.with_suffix(".html"), journal.with_suffix(RESULT), recipe):
        if path is not None:
            refuse_foreign(path, owner, force=force)
    if recipe is not None and os.path.lexists(recipe) and not force:
        try:
            read_recipe(recipe)
        except UsageError as error:
            raise UsageError(
                error.message, "name another with --recipe FILE, or add --force to overwrite it"
            ) from error


def keep_result(content: Mapping[str, object], journal: Path, owner: str, *, force: bool = False) -> None:
    """Write the `--json` object beside the journal, atomically. `owner`: the study's identity."""
    data = msgspec.json.encode({"made_by": signature(owner), **content})
    hint = f"free space and run the command again with --study {journal}: its trials are kept"
    write_own(data, journal.with_suffix(RESULT), owner, force=force, hint=hint)
