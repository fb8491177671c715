"""What may move the answer: a filter of the table of changes, with what the estimate knows of each. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvtune.answers.capacity.estimate import Engine
from kvtune.answers.changes import PREEMPTED, Change, Situation, changed_flags, changes, serving, situation
from kvtune.data.run.types import EngineInfo
from kvtune.lab.setup.setup import Setup

SHARE, TIER_SHARE = 0.5, 0.25
"""Changes are replayed for this share of the measured time, dear ones for less; so is what they are compared with."""
TIER_TIMES = 5.0
"""How many times as long as one of the base a replay with a host tier takes."""

LESS_AT_ONCE = {"max-num-batched-tokens": "chunk", "max-num-seqs": "max_num_seqs"}
"""Flags of which the estimate has a field, and which are doubtful: they may bring hits only where prompts wait."""


@dataclass(frozen=True, slots=True)
class Option:
    """A change. `setup`: what is replayed, None for one that arithmetic refuses (`why_not`).

    `engine`: what the estimate knows of it, None if that cannot tell it from the base. `times`: how many times as long
    as one of the base a replay takes. `doubtful`: it is replayed only if the estimate finds more sessions with it.
    """

    name: str
    setup: Setup | None = None
    flags: tuple[str, ...] = ()
    engine: Engine | None = None
    note: str = ""
    why_not: str = ""
    share: float = SHARE
    times: float = 1.0
    more_memory: bool = False
    doubtful: bool = False


def options(setup: Setup, info: EngineInfo, engine: Engine, sessions: int) -> list[Option]:
    """Return what is worth a replay with `sessions` at once, and what arithmetic refuses."""
    here = situation(setup, info, sessions=sessions)
    named = (change for change in changes(here) if change.name and {*change.wins} != {PREEMPTED})
    return [replace(_option(change, here), engine=_estimated(change, here, engine)) for change in named]


def against_preemptions(setup: Setup, info: EngineInfo) -> list[Option]:
    """Return what is worth a replay only where the engine preempts requests."""
    here = situation(setup, info, sessions=1)
    named = (change for change in changes(here) if change.name and {*change.wins} == {PREEMPTED})
    return [_option(change, here) for change in named]


def _option(change: Change, here: Situation) -> Option:
    if change.why_not:
        return Option(change.name, why_not=change.why_not)
    flags = changed_flags(change, here.setup).keys()
    return Option(
        change.name,
        change.setup,
        tuple(serving(change, here.setup)),
        note=change.note,
        share=TIER_SHARE if change.times > 1 else SHARE,
        times=change.times,
        more_memory=change.more_memory,
        doubtful=change.kept is None and bool(flags) and flags <= LESS_AT_ONCE.keys(),
    )


def _estimated(change: Change, here: Situation, engine: Engine) -> Engine | None:
    """Return what the estimate knows of the engine with a change: its pool, tier, steps and seats."""
    fields = dict[str, Any]()
    if change.why_not or change.kept is not None:
        return None
    for name, value in changed_flags(change, here.setup).items():
        if name == "num-gpu-blocks-override":
            fields["pool"] = int(engine.pool * int(value or 0) / here.blocks)
        elif name == "kv-offloading-size":
            fields["cache"] = engine.pool * round(float(value or 0) / here.all_ranks_gib)
        elif name in LESS_AT_ONCE:
            fields[LESS_AT_ONCE[name]] = int(value or 0)
        else:
            return None
    return replace(engine, **fields) if fields else None
