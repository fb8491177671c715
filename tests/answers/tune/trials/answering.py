"""What stands in for benches: each trial is answered by a function of its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from kvtune.answers.tune.trials.run import Answer, PlannedTrial, Trials

Answers = Callable[[Trials, PlannedTrial], Answer]


def answered(patch: pytest.MonkeyPatch, answer: Answers, *, backwards: bool = False) -> list[PlannedTrial]:
    """Answer all trials so; return the plans that were asked. `backwards`: the last plan ends first."""
    asked: list[PlannedTrial] = []

    def run(trials: Trials, plans: Sequence[PlannedTrial]) -> Iterator[tuple[int, Answer]]:
        for place in sorted(range(len(plans)), reverse=backwards):
            asked.append(plans[place])
            yield place, answer(trials, plans[place])

    patch.setattr(Trials, "_replay", run)
    patch.setattr(Trials, "_measure", run)
    return asked
