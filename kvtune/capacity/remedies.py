"""What may move the answer: changes of the engine, to replay and as the estimate knows them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtune.capacity.estimate import Engine
from kvtune.engine.flags import flag_value
from kvtune.engine.setup import Setup
from kvtune.legal import Value
from kvtune.recipe import engine_flags
from kvtune.run.types import EngineInfo
from kvtune.units import size

GIB = 1 << 30
GROWN = 1.25
WATERMARK = 0.05
TIER = 2
"""The host tier that is tried, as a multiple of the pool: vLLM's is inclusive, so a smaller one holds nothing new."""


@dataclass(frozen=True, slots=True)
class Option:
    """A change. `setup`: what is replayed, None for one that arithmetic refuses (`why_not`).

    `engine`: what the estimate knows of it, None if that cannot tell it from the base. `replicas`: engines that share
    as many times the sessions.
    """

    name: str
    setup: Setup | None = None
    flags: tuple[str, ...] = ()
    engine: Engine | None = None
    note: str = ""
    why_not: str = ""
    replicas: int = 1
    slow: bool = False
    """Whether a replay takes several times as long as one of the base."""
    more_memory: bool = False


def options(
    setup: Setup, info: EngineInfo, engine: Engine, sessions: int, *, preempts: bool = False
) -> list[Option]:
    """Return what is worth a replay with `sessions` at once, and what arithmetic refuses.

    `preempts`: with that many sessions, the engine preempts requests.
    """
    found = [
        replace(
            _flags(
                f"pool x{GROWN:g}",
                setup,
                {"num_gpu_blocks_override": int(info.num_blocks * GROWN)},
                replace(engine, pool=int(engine.pool * GROWN)),
                note="more memory for the cache: another share of the GPU, or smaller weights",
            ),
            more_memory=True,
        ),
        _fp8(setup, info, engine),
        _retention(setup, info),
        *_tier(setup, info, engine),
    ]
    chunk = max(engine.chunk // 4, engine.max_num_seqs)
    if chunk < engine.chunk:
        found.append(
            _flags(
                f"steps of {chunk:,} tokens",
                setup,
                {"max_num_batched_tokens": chunk},
                replace(engine, chunk=chunk),
            )
        )
    max_num_seqs = max(2, sessions // 2)
    if max_num_seqs < engine.max_num_seqs:
        found.append(
            _flags(
                f"{max_num_seqs} requests at once",
                setup,
                {"max_num_seqs": max_num_seqs},
                replace(engine, max_num_seqs=max_num_seqs),
            )
        )
    if preempts and float(flag_value(setup.engine_args, "watermark") or 0) < WATERMARK:
        found.append(
            _flags(
                f"{100 * WATERMARK:g} % of the pool kept free",
                setup,
                {"watermark": WATERMARK},
                None,
                note="against preemptions: a request waits until so much is free",
            )
        )
    if setup.core == "stock":
        found.append(Option("kvtune's core", setup.with_core(), ("--core", "kvtune")))
    found.append(
        Option(
            "two replicas",
            setup.replayed(replicas=2, router="session"),
            ("--replicas", "2", "--router", "session"),
            note="with twice the sessions, each kept on one replica",
            replicas=2,
            slow=True,
            more_memory=True,
        )
    )
    return found


def _flags(
    name: str, setup: Setup, values: Mapping[str, Value], engine: Engine | None, note: str = ""
) -> Option:
    return Option(name, setup.with_knobs(values), tuple(engine_flags(dict(values))), engine, note)


def _fp8(setup: Setup, info: EngineInfo, engine: Engine) -> Option:
    name, note = "fp8 KV", "accuracy was not judged"
    given = flag_value(setup.engine_args, "kv-cache-dtype") or "auto"
    if given != "auto":
        return Option(name, why_not=f"the KV cache is {given} already")
    # Half the bytes of a token: twice the blocks. A model with states has bytes that it does not halve.
    twice = _flags(name, setup, {"num_gpu_blocks_override": 2 * info.num_blocks}, None, note)
    if any("mamba" in str(group.get("kind", "")).lower() for group in info.groups):
        return Option(
            name, why_not="its states keep their size, and how many blocks there are then was not planned"
        )
    return replace(
        twice, flags=("--kv-cache-dtype", "fp8"), engine=replace(engine, pool=2 * engine.pool), note=note
    )


def _retention(setup: Setup, info: EngineInfo) -> Option:
    name = "windows kept every 1,024 tokens"
    if len(info.groups) < 2:
        return Option(name, why_not="all layers are full attention: retention is for windows and states")
    return _flags(name, setup, {"prefix_cache_retention_interval": 1024}, None)


def _tier(setup: Setup, info: EngineInfo, engine: Engine) -> list[Option]:
    pool_bytes = info.pool_bytes
    if not pool_bytes:
        return [Option("host tier", why_not="the pool's bytes are not known")]
    if flag_value(setup.engine_args, "kv-offloading-size"):
        return [Option("host tier", why_not="the engine has one")]
    gib = TIER * pool_bytes / GIB
    return [
        Option(
            f"host tier up to {size(pool_bytes)}",
            why_not="it holds less than the pool: vLLM copies to it what the pool has, so every token in it is in both",
        ),
        replace(
            _flags(
                f"host tier of {size(TIER * pool_bytes)}",
                setup,
                {"kv_offloading_size": round(gib, 3)},
                replace(engine, cache=TIER * engine.pool),
                note="the speed of its copies is assumed",
            ),
            slow=True,
            more_memory=True,
        ),
    ]
