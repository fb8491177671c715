"""Tuning from start to end: stock on the engine, search in simulation, finalists on the engine, the recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from msgspec import structs

from kvtune.answers.tune import guard
from kvtune.answers.tune.answers import checked
from kvtune.answers.tune.confirm import Bout, Confirmed, Contender, confirm, figures_of, outcome_of
from kvtune.answers.tune.objective import Objective
from kvtune.answers.tune.recipes.make import recipe_of, simulated_recipe
from kvtune.answers.tune.result import Finalist, Outcome, Settings, StudyResult, Trial, study_identity
from kvtune.answers.tune.search import SearchSettings, search, tuned_space
from kvtune.answers.tune.simplify import simplify
from kvtune.answers.tune.space.grid import Space, grid
from kvtune.answers.tune.sweep import study_result
from kvtune.answers.tune.ties import finalists
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.trials.run import Trials
from kvtune.base.errors import KvtuneError
from kvtune.data.flags import flag_value, settings_given
from kvtune.data.knobs import ENGINE, KNOBS, ModelFacts
from kvtune.data.recipe import Recipe, write_recipe
from kvtune.data.run.signature import refuse_foreign, signature
from kvtune.lab.engine.experiment import BASELINE
from kvtune.lab.lab import LAB, Lab, Replaying
from kvtune.lab.setup.offload_flags import tier_given
from kvtune.lab.setup.setup import Real, Setup
from kvtune.reading.analysis.comparison.compare import FEWEST

JOINED = (
    "joined: the trials are in the shared study; the worker that began it confirms them and writes the recipe"
)
TRIED = ("stream_interval",)
"""The knobs to try for an objective that replays cannot measure (`ceiling`)."""

COLLECTOR: tuple[Settings, ...] = ({"gc_threshold0": 20_000}, {"collect_at_wait": True})
"""Garbage-collector settings that `--gc` tries on the engine, added to the best simulated settings."""


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """The inputs of `tune`: set-up, objective, outputs and limits."""

    setup: Setup
    facts: ModelFacts
    by: Objective
    output: Path
    """Folder for the run files of engine runs."""
    recipe: Path
    """The recipe's file, written if there is a winner."""
    search: SearchSettings
    force: bool = False
    """Overwrite a recipe that this study did not write."""
    finalists: int = 2
    rounds: int = 4
    budget_s: float = 600.0
    """Seconds for the engine runs of the confirmation: after two rounds, no run begins that would end later."""
    on_engine: bool = True
    guards: tuple[str, ...] = ()
    """Workloads on which a finalist's hit rate must be at least stock's less `guard.MARGIN`."""
    collector: bool = False
    """Also try settings of the garbage collector, which only an engine can judge."""
    lab: Lab = LAB


class Progress(Protocol):
    """Called with each trial when it ends. `phase` is called with each phase's name when it begins."""

    def __call__(self, trial: Trial) -> None: ...

    def phase(self, text: str) -> None: ...


def tune(settings: TuneSettings, journal: StudyJournal, progress: Progress) -> StudyResult:
    """Search, confirm, write the recipe. Without a winner there is no recipe, and the verdict says why."""
    why: list[str] = []
    result = _tune(settings, journal, progress, why)
    return structs.replace(result, notes=(*why, *result.notes))


def _tune(settings: TuneSettings, journal: StudyJournal, progress: Progress, why: list[str]) -> StudyResult:
    """Do the work of `tune`; append to `why` the reasons for the chosen settings."""
    s, setup, objective = settings, settings.setup, settings.by
    bout = Bout(Trials(setup, journal, progress, s.lab, output=s.output))
    baseline = Contender(BASELINE, {})
    replayed = setup
    if s.guards and (setup.sizes_pool or not s.on_engine):
        progress.phase("stock on the guards")
        guard.check(setup, s.guards, s.lab)
    if s.on_engine and not s.search.join:
        progress.phase("stock on the engine")
        bout.run((baseline,), 1)
        replayed = setup.as_ran(baseline.runs[0]) if objective.replayed else setup
        if s.guards and not setup.sizes_pool:
            progress.phase("stock on the guards, with the pool of its run")
            guard.check(replayed, s.guards, s.lab)
    if not objective.replayed:
        return _on_engine_alone(s, bout, baseline, journal, progress, why)
    with Replaying(s.lab) as lab:
        progress.phase("searching in simulation")
        simulated = search(replayed, _space(s), objective, journal, s.search, progress, lab)
        stock = next((t for t in simulated if t.role == "baseline"), None)
        if s.search.join:
            best = finalists(
                simulated, objective, s.finalists
            )  # the worker that began the study replays its guards
            return simulated_result(journal, objective, stock, best[0] if best else None, JOINED)
        best = _finalists(s, simulated, replayed, progress.phase, lab)
        if not best:
            none = (
                "no winner: no candidate held on the guards"
                if s.guards
                else "no simulated trial was completed"
            )
            return simulated_result(journal, objective, stock, None, none)
        best = _simplified(s, best, journal, replayed, progress.phase, why, lab)
        if setup.core == "stock" and not (best := [trial for trial in best if trial.settings]):
            return simulated_result(
                journal, objective, stock, stock, "no winner: nothing beat stock in simulation"
            )
        if not s.on_engine:
            return _simulated(s, journal, stock, best[0], len(simulated))
    exact = not any(each.timed for each in objective.all)
    scores = [objective.score(trial.summary) if exact else None for trial in best]
    sides = [Contender("trial", t.settings, replayed=score) for t, score in zip(best, scores, strict=True)]
    if s.collector:
        sides += [Contender("trial", {**best[0].settings, **more}) for more in COLLECTOR]
    progress.phase(f"finalists on the engine{_least_time(objective, baseline, sides)}")
    confirmed = confirm(bout, baseline, sides, objective, rounds=s.rounds, budget_s=s.budget_s)
    if left := best[len(confirmed.finalists) :]:
        numbers = ", ".join(str(trial.number) for trial in left)
        why.append(f"trial {numbers}: not run on the engine, as the replay hits no more than the winner did")
    return _engine_result(s, journal, confirmed, progress, why, len(simulated))


def _keep(recipe: Recipe, s: TuneSettings) -> None:
    owner = study_identity("tune", s.setup)
    refuse_foreign(s.recipe, owner, force=s.force)
    write_recipe(recipe, s.recipe, signature(owner))


def tried_without_replays(s: TuneSettings) -> list[Settings]:
    """Return the settings to try for an objective that replays cannot measure: knobs of the front end."""
    given = {flag.replace("-", "_") for flag in settings_given(s.setup.engine_args)}
    names = [name for name in TRIED if name not in given]
    space: Space = {name: KNOBS[name].candidates(s.facts) for name in names}
    return [*grid(space), *(COLLECTOR if s.collector else ())]


def fewest_runs(objective: Objective, finalists: int, *, in_turn: bool) -> int:
    """Return the engine runs of a confirmation at least: of stock and of each finalist.

    `in_turn`: finalists that replays ranked for sure run one after the other, so the first may do.
    """
    timed = any(each.timed for each in objective.all)
    return 2 * FEWEST if in_turn and objective.replayed and not timed else (finalists + 1) * FEWEST + timed


def _least_time(objective: Objective, baseline: Contender, sides: Sequence[Contender]) -> str:
    """Say how long the least runs take after stock's first, estimated from that; "" without it."""
    if not baseline.runs:
        return ""
    header = baseline.runs[-1].header
    in_turn = all(side.replayed is not None for side in sides)
    runs = fewest_runs(objective, len(sides), in_turn=in_turn) - 1
    return f": {runs} runs or more, at least {runs * (header.startup_s + header.wall_s) / 60:.0f} min"


def _on_engine_alone(
    s: TuneSettings,
    bout: Bout,
    baseline: Contender,
    journal: StudyJournal,
    progress: Progress,
    why: list[str],
) -> StudyResult:
    for each in s.by.all:
        if each.of(baseline.trials[-1].summary) is None:
            raise KvtuneError(
                f"this engine's runs have no {each.name}", "add --on host: its runs always record this figure"
            )
    progress.phase("settings of the front end on the engine")
    sides = [Contender("trial", settings) for settings in tried_without_replays(s)]
    confirmed = confirm(bout, baseline, sides, s.by, rounds=s.rounds, budget_s=s.budget_s)
    return _engine_result(s, journal, confirmed, progress, why)


def _space(s: TuneSettings) -> Space:
    flags = s.setup.engine_args
    given = {name: flag_value(flags, name.replace("_", "-")) for name in ENGINE}
    given |= {name: str(value) for name, value in tier_given(flags).items()}
    return tuned_space(s.facts, given, timed=any(o.timed for o in s.by.all), core=s.setup.core)


def _finalists(
    s: TuneSettings, simulated: Sequence[Trial], replayed: Setup, phase: Callable[[str], None], lab: Lab
) -> list[Trial]:
    """Return the best simulated trials; with guards, the best of those that pass all guards."""
    if not s.guards:
        return finalists(simulated, s.by, s.finalists)
    phase("guards in simulation")
    candidates = guard.candidates(finalists(simulated, s.by, guard.TRIED), simulated)
    return guard.holding(replayed, s.guards, candidates, phase, lab)[: s.finalists]


def _simplified(
    s: TuneSettings,
    finalists: Sequence[Trial],
    journal: StudyJournal,
    replayed: Setup,
    phase: Callable[[str], None],
    why: list[str],
    lab: Lab,
) -> list[Trial]:
    """Return the finalists, without needless knobs where the guards allow it; each setting once."""
    phase("taking the finalists' knobs out, one by one")
    simpler = simplify(replayed, finalists, s.by, journal, phase, lab)
    held = guard.holding(replayed, s.guards, [each.trial for each in simpler], phase, lab)
    kept: dict[str, Trial] = {}
    for trial, each in zip(finalists, simpler, strict=True):
        taken = each.trial if each.trial in held else trial
        if taken.key in kept:
            continue
        kept[taken.key] = taken
        if taken is each.trial and each.dropped:
            why.append(
                f"trial {taken.number} is trial {trial.number} without {', '.join(each.dropped)}: "
                "the replay is the same without them"
            )
    return list(kept.values())


def _simulated(
    s: TuneSettings, journal: StudyJournal, stock: Trial | None, best: Trial, simulated: int
) -> StudyResult:
    """End a search without an engine: write a recipe marked simulated if a setting beat stock."""
    objective = s.by
    mine = objective.score(best.summary)
    theirs = objective.score(stock.summary) if stock is not None else None
    if mine is None or theirs is None or stock is None or mine <= theirs:
        why = "no winner: nothing beat stock in simulation"
        return simulated_result(journal, objective, stock, best, why)
    _keep(simulated_recipe(s.setup, objective, best, stock, simulated), s)
    figures = (objective.of(trial.summary) for trial in (best, stock))
    text = "{} {:.4g} against stock's {:.4g}, in simulation only".format(objective.name, *figures)
    return simulated_result(journal, objective, stock, best, text, s.recipe)


def simulated_result(
    journal: StudyJournal,
    objective: Objective,
    stock: Trial | None,
    best: Trial | None,
    text: str,
    recipe: Path | None = None,
) -> StudyResult:
    """Return the result of a study in which no finalist ran on the engine."""
    verdict = Outcome(
        winner=recipe is not None,
        objective=objective.name,
        objectives=objective.names,
        on="sim",
        text=text,
        drift_ttft=None,
        engine_runs={"baseline": 0, "leader": 0},
        figures=(),
    )
    return study_result("tune", journal.trials, objective, verdict, best=best, baseline=stock, recipe=recipe)


def _engine_result(
    s: TuneSettings,
    journal: StudyJournal,
    confirmed: Confirmed,
    progress: Progress,
    why: list[str],
    simulated: int = 0,
) -> StudyResult:
    """End with the engine's verdict: write the recipe of its winner, if its hits are not wrong.

    `simulated`: the number of simulated trials. `why`: a sentence about the winner's hits is added.
    """
    if confirmed.winner is not None and isinstance(s.setup.device, Real):
        progress.phase("the hits of the winner's server")
        bench = s.lab.engine(s.output, probe="off")
        wrong, sentence = checked(s.setup.with_knobs(confirmed.winner.settings), bench, s.lab.clock())
        if wrong:
            confirmed = replace(confirmed, winner=None, why=sentence)
        elif sentence:
            why.append(sentence)
    winner, leader = confirmed.winner, confirmed.leader
    if winner is not None:
        _keep(recipe_of(s.setup, s.by, confirmed, winner, simulated), s)
    return study_result(
        "tune",
        journal.trials,
        s.by,
        outcome_of(confirmed, s.by),
        best=leader.trials[-1] if leader is not None else None,
        baseline=confirmed.baseline.trials[-1],
        finalists=tuple(_finalist(confirmed, side) for side in confirmed.finalists),
        recipe=s.recipe if winner is not None else None,
    )


def _finalist(confirmed: Confirmed, side: Contender) -> Finalist:
    return Finalist(
        settings=side.settings,
        winner=side is confirmed.winner,
        failed=side.failed,
        trials=tuple(t.number for t in side.trials),
        run_files=tuple(t.run_file for t in side.trials if t.run_file),
        figures=figures_of(confirmed.baseline, side) if side.runs else (),
    )
