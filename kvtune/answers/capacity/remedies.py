"""What may move the answer: a filter of the table of changes. Pure."""

from __future__ import annotations

from kvtune.answers.changes import PREEMPTED, Change, changed_flags, changes, situation
from kvtune.data.run.types import EngineInfo
from kvtune.lab.setup.setup import Setup

LESS_AT_ONCE = {"max-num-batched-tokens", "max-num-seqs"}


def options(setup: Setup, info: EngineInfo, sessions: int) -> list[Change]:
    """Return what may bring hits with `sessions` at once, and what arithmetic refuses."""
    table = changes(situation(setup, info, sessions=sessions))
    return [change for change in table if change.name and {*change.wins} != {PREEMPTED}]


def against_preemptions(setup: Setup, info: EngineInfo) -> list[Change]:
    """Return what is worth a replay only where the engine preempts requests."""
    table = changes(situation(setup, info, sessions=1))
    return [change for change in table if change.name and {*change.wins} == {PREEMPTED}]


def doubtful(change: Change, setup: Setup) -> bool:
    """Whether a change may bring hits only where prompts wait: fewer of them at once, or fewer tokens."""
    flags = changed_flags(change, setup).keys()
    return change.kept is None and bool(flags) and flags <= LESS_AT_ONCE
