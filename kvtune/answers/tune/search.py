"""Stage one of tuning: Optuna proposes settings, the simulator scores them. The same seed leads to the same trials.

Settings are proposed two at a time, and scores are reported in the order of the proposals, whichever replay ends first.
The scores of trials in the journal are reported without a new replay, so a resumed study continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec import structs

from kvtune.answers.tune.objective import Objective
from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.space.grid import Space
from kvtune.answers.tune.space.reuse import reuse_values
from kvtune.answers.tune.storage import OptunaStudy
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.trials.run import STOCK, PlannedTrial, Trials
from kvtune.data.knobs import CORE, ENGINE, KNOBS, LAYOUT, TIER, TIER_SIZE, Bundle, ModelFacts
from kvtune.data.recipe import Scalar
from kvtune.lab.lab import LAB, Lab
from kvtune.lab.setup.setup import CoreName, Setup

AT_ONCE = 2
REUSE = ("reuse_bonus_s", "ghost_factor")
TIER_PARTS = (8, 4, 2, 1)
"""The tier sizes to try: the requested size divided by each of these."""


def tuned_space(
    facts: ModelFacts,
    engine_args_given: Mapping[str, str | None],
    *,
    timed: bool = False,
    core: CoreName = "kvtune",
) -> Space:
    """Return the space that `kvtune tune` searches for this model, without settings that flags after `--` fix.

    `core`: of stock's, only vLLM's own flags are searched.
    `timed`: include the interval between prefills, which changes times but no hits. If the flags turn on a tier of host
    memory, the tier's size (up to the given size) and its other settings are included.
    """
    tuned = [knob for knob in KNOBS.values() if knob.tuned and knob.tuned(facts)]
    if core == "stock":
        tuned = [knob for knob in ENGINE.values() if knob in tuned or knob.tuned_in_stock]
    tuned.sort(key=lambda knob: knob.acts != "layout")
    given_gib = engine_args_given.get(TIER_SIZE)
    if given_gib is not None:
        tuned += [knob for knob in TIER.values() if knob.searched]
    space: Space = {}
    for knob in tuned:
        if engine_args_given.get(knob.name) is None and (timed or not knob.times_only):
            layouts = facts.layouts if knob.acts == "layout" else ()
            space[LAYOUT if layouts else knob.name] = layouts or knob.candidates(facts)
    if given_gib is not None:
        space[TIER_SIZE] = tuple(float(given_gib) / part for part in TIER_PARTS)
    return {name: values for name, values in space.items() if len(values) > 1}


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """`storage`: URL of a database in which several workers share a study. `join`: another worker began the study."""

    trials: int = 40
    seed: int = 0
    storage: str = ""
    join: bool = False


def search(
    setup: Setup,
    space: Space,
    objective: Objective,
    journal: StudyJournal,
    settings: SearchSettings,
    say: Callable[[Trial], None],
    lab: Lab = LAB,
) -> list[Trial]:
    """Search, and return the study's simulated trials, baseline included, each setting once.

    Which knob values of `two_class` (an eviction policy) are tried depends on the workload's reuse distances. They are
    computed after the baseline's replay, which shows how long the workload takes.
    """
    study = OptunaStudy(setup, objective, settings.seed, storage=settings.storage, join=settings.join)
    setup = study.share_engine(setup, mine=not settings.join)
    others = [trial for trial in study.trials() if trial.on == "sim"]
    with Trials(setup.replayed(), journal, say, lab, done=others) as trials:
        # The defaults of kvtune's core are a trial; those of stock are the baseline.
        defaults = [PlannedTrial({})] if setup.core == "kvtune" else []
        baseline, *_ = trials.run([STOCK, *defaults])
        if baseline.state == "complete" and REUSE[0] in space:
            space = {**space, **reuse_values(setup.load.built(), baseline.summary)}
        space = {name: _default_first(name, values) for name, values in space.items()}
        for order in () if settings.join else space.get("policy", ()):
            # Each policy alone with defaults: next to a setting that harms it, a good policy would look bad.
            study.propose_first(space, {"policy": str(order)})
        while (done := study.finished()) < settings.trials:
            proposed = [study.ask(space) for _ in range(min(AT_ONCE, settings.trials - done))]
            made = trials.run(PlannedTrial(settings) for _, settings in proposed)
            for (handle, _), trial in zip(proposed, made, strict=True):
                study.tell(handle, _scores(objective, trial), trial)
    simulated = {t.key: t for t in journal.trials if t.on == "sim"}
    for other in study.trials():  # other machines' trials belong to this study's journal and page, too
        if other.key not in simulated:
            number = 1 + max(trial.number for trial in journal.trials)
            simulated[other.key] = structs.replace(other, number=number)
            journal.add(simulated[other.key])
    return list(simulated.values())


def _default_first(name: str, values: tuple[Scalar | Bundle, ...]) -> tuple[Scalar | Bundle, ...]:
    """Put the default first among a core knob's values; values of vLLM's settings begin with the default already."""
    if name not in CORE:
        return values
    return tuple(sorted(values, key=lambda value: value != CORE[name].default))


def _scores(objective: Objective, trial: Trial) -> list[float] | None:
    """Return one score per objective, larger is better; None for a failed trial or a missing figure."""
    if trial.state != "complete":
        return None
    every = [each.score(trial.summary) for each in objective.all]
    scores = [score for score in every if score is not None]
    return scores if len(scores) == len(every) else None
