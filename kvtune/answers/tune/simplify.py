"""Removes a setting's knobs one by one in replays, and leaves out of a recipe those that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtune.answers.tune.effects import effects
from kvtune.answers.tune.objective import Objective
from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.ties import is_default, no_worse
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.trials.run import PlannedTrial, Trials
from kvtune.lab.lab import LAB, Lab
from kvtune.lab.setup.setup import Setup


@dataclass(frozen=True, slots=True)
class Simplified:
    """A trial without needless knobs. `trial`: the replay with the remaining knobs. `dropped`: the removed knobs."""

    trial: Trial
    dropped: tuple[str, ...] = ()


def simplify(
    setup: Setup,
    trials: Sequence[Trial],
    objective: Objective,
    journal: StudyJournal,
    say: Callable[[str], None],
    lab: Lab = LAB,
) -> list[Simplified]:
    """Reduce each trial to the knobs that matter. Replays are journalled as trials, so each is made only once."""
    # Knobs with a small mean effect are removed first: of two knobs that do the same, the stronger one stays.
    tried = [t for t in journal.trials if t.on == "sim" and t.role == "trial"]
    strength = {effect.knob: effect.spread for effect in effects(tried, objective)}
    with Trials(setup.replayed(), journal, lab=lab) as replays:

        def of(trial: Trial) -> Simplified:
            kept, dropped = trial, list[str]()
            defaults = tuple(n for n, value in trial.settings.items() if is_default(n, value))
            single = sorted(trial.settings.keys() - set(defaults), key=lambda n: (strength.get(n, 0.0), n))
            for names in filter(None, (defaults, *((name,) for name in single))):
                others = {n: v for n, v in kept.settings.items() if n not in names}
                (without,) = replays.run([PlannedTrial(others)])
                if no_worse(without, kept, objective):
                    say(f"without {', '.join(names)}: the same, left out")
                    kept = without
                    dropped += names
            return Simplified(kept, tuple(dropped))

        return [of(trial) for trial in trials]
