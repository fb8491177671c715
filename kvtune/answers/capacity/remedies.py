"""What may move the answer: changes of the engine, to replay and as the estimate knows them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvtune.answers.capacity.replays import Engine
from kvtune.answers.explain.remedies import (
    GIB,
    Change,
    Situation,
    changed_flags,
    fewer_requests,
    free_blocks,
    host_tier,
    interval_of,
    kept_windows,
    larger_pool,
    other_core,
    shorter_steps,
    situation,
)
from kvtune.base.units import size
from kvtune.data.flags import flag_value
from kvtune.data.run.types import EngineInfo
from kvtune.lab.setup.setup import Setup

SHARE, TIER_SHARE = 0.5, 0.25
"""Changes are replayed for this share of the measured time, and so is what they are compared with."""
TIER_TIMES = 5.0
"""Blocks go through a host tier one by one."""
GROWN = 1.25
WATERMARK = 0.05
INTERVAL = 1024
TIER = 2
"""The host tier that is tried, as a multiple of the pool: vLLM's is inclusive, so a smaller one holds nothing new."""


@dataclass(frozen=True, slots=True)
class Option:
    """A change. `setup`: what is replayed, None for one that arithmetic refuses (`why_not`).

    `engine`: what the estimate knows of it, None if that cannot tell it from the base.
    """

    name: str
    setup: Setup | None = None
    flags: tuple[str, ...] = ()
    engine: Engine | None = None
    note: str = ""
    why_not: str = ""
    share: float = SHARE
    times: float = 1.0
    """How many times as long as one of the base a replay takes."""
    more_memory: bool = False
    doubtful: bool = False
    """Whether it is replayed only if the estimate finds more sessions with it."""


def options(setup: Setup, info: EngineInfo, engine: Engine, sessions: int) -> list[Option]:
    """Return what is worth a replay with `sessions` at once, and what arithmetic refuses."""
    here = situation(setup, info)
    chunk, most = max(engine.chunk // 4, engine.max_num_seqs), max(2, sessions // 2)
    grown = _of(
        here,
        larger_pool(here, GROWN),
        replace(engine, pool=int(engine.pool * GROWN)),
        "more memory for the cache: another share of the GPU, or smaller weights",
    )
    tried = [
        replace(grown, more_memory=True),
        _fp8(here, engine),
        _retention(here, info),
        *_tier(here, engine),
    ]
    if chunk < engine.chunk:
        shorter = _of(here, shorter_steps(here, chunk, 0.0), replace(engine, chunk=chunk), "")
        tried.append(replace(shorter, doubtful=True))
    if most < engine.max_num_seqs:
        fewer = _of(here, fewer_requests(here, most), replace(engine, max_num_seqs=most), "")
        tried.append(replace(fewer, doubtful=True))
    if setup.core == "stock":
        tried.append(replace(_of(here, other_core(here), None, ""), flags=("--core", "kvtune")))
    return tried


def against_preemptions(setup: Setup, info: EngineInfo) -> list[Option]:
    """Return what is worth a replay where the engine preempts requests."""
    here = situation(setup, info)
    free = free_blocks(here, WATERMARK)
    return [] if free.why_not else [_of(here, free, None, f"against preemptions: {free.cost}")]


def _of(here: Situation, change: Change, engine: Engine | None, note: str) -> Option:
    flags = tuple(
        word
        for name, value in changed_flags(change, here.setup).items()
        for word in (f"--{name}", str(value))
    )
    return Option(change.name, change.setup, flags, engine, note)


def _fp8(here: Situation, engine: Engine) -> Option:
    name = "fp8 KV"
    given = flag_value(here.setup.engine_args, "kv-cache-dtype") or "auto"
    if given != "auto":
        return Option(name, why_not=f"the KV cache is {given} already")
    if here.states:
        return Option(
            name, why_not="its states keep their size, and how many blocks there are then was not planned"
        )
    # Half the bytes of a token: twice the blocks.
    setup, flags = larger_pool(here, 2.0).setup, ("--kv-cache-dtype", "fp8")
    return Option(name, setup, flags, replace(engine, pool=2 * engine.pool), "accuracy was not judged")


def _retention(here: Situation, info: EngineInfo) -> Option:
    change = kept_windows(here, interval_of(here, INTERVAL), 0.0)
    if len(info.groups) < 2:
        why_not = "all layers are full attention: retention is for windows and states"
        return Option(change.name, why_not=why_not)
    return _of(here, change, None, "")


def _tier(here: Situation, engine: Engine) -> list[Option]:
    tier = host_tier(here, TIER)
    if tier.why_not:
        return [Option("host tier", why_not=tier.why_not)]
    larger = _of(here, tier, replace(engine, cache=TIER * engine.pool), "the speed of its copies is assumed")
    return [
        Option(
            f"host tier up to {size(here.all_ranks_gib * GIB)}",
            why_not="it holds less than the pool: vLLM copies to it what the pool has, so every token in it is in both",
        ),
        replace(larger, share=TIER_SHARE, times=TIER_TIMES, more_memory=True),
    ]
