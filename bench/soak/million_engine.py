"""The engines of the million: vLLM's EngineCore in the simulator, with the core's parts or without.

kind      what                                                        steps
core      the core with its default settings                          vLLM's own, one by one
alike     the core with settings under which it decides as stock      vLLM's own, one by one
stock     stock                                                       vLLM's own, one by one
fast X    the same as X                                               the simulator's quick paths where they apply
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Literal

from bench.soak.trouble import LONGEST, SEQUENCES
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.clock import VirtualClock
from kvtune.lab.sim.engine_types import EngineCore

Kind = Literal["core", "alike", "stock", "fast core", "fast alike", "fast stock"]


@dataclass(frozen=True, slots=True)
class Model:
    """`blocks`: too few for SEQUENCES long requests. `alike`: settings with which the core decides as stock does."""

    name: str
    blocks: int
    flags: tuple[str, ...]
    alike: dict[str, str | bool] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Whether the core's defaults decide otherwise than stock."""
        return bool(self.alike)


SMALL_BLOCKS = ("--block-size", "32", "--max-num-batched-tokens", "512")
MODELS = {
    model.name: model
    for model in (
        Model("tiny-llama", 80, SMALL_BLOCKS, {"policy": "lru"}),
        Model("tiny-gemma3", 200, SMALL_BLOCKS, {"policy": "lru", "pinning": False}),
        # A block holds a state: 256 or 384 tokens, by the CPU.
        Model("tiny-qwen3next", 26, ("--max-num-batched-tokens", "1024")),
    )
}


@dataclass(frozen=True, slots=True)
class Scheduling:
    """`ahead`: asynchronous scheduling, a batch is always in flight."""

    ahead: bool
    policy: Literal["priority", "fcfs"]

    def __str__(self) -> str:
        return f"{'async' if self.ahead else 'sync'} {self.policy}"


SCHEDULINGS = tuple(Scheduling(ahead, policy) for policy in ("priority", "fcfs") for ahead in (False, True))
"""Round n is played with number n modulo 4."""


@dataclass(slots=True)
class Built:
    kind: Kind
    engine: EngineCore
    clock: VirtualClock
    settings: Setup


def settings_of(model: Model, scheduling: Scheduling, kind: Kind) -> Setup:
    flags = [
        *("--max-model-len", str(LONGEST), "--max-num-seqs", str(SEQUENCES)),
        *("--num-gpu-blocks-override", str(model.blocks), "--scheduling-policy", scheduling.policy),
    ]
    return Setup(
        model=model.name,
        engine_args=[*model.flags, *flags],
        core="stock" if kind.endswith("stock") else "kvtune",
        core_settings=dict(model.alike) if kind.endswith("alike") else {},
        device=Simulated(async_scheduling=scheduling.ahead, shortcuts=kind.startswith("fast"), digests=True),
    )


def built(model: Model, scheduling: Scheduling, kind: Kind) -> Built:
    """A new engine, whose scheduler is audited after each of its steps."""
    from bench import audit
    from kvtune.lab.sim import build

    os.environ |= {"KVTUNE_AUDIT": "raise", "KVTUNE_STRICT": "1"}
    settings = settings_of(model, scheduling, kind)
    _unload()
    clock = VirtualClock()
    engine = build.build(settings, clock)
    audit.watch(engine.scheduler)
    return Built(kind, engine, clock, settings)


def _unload() -> None:
    """Engines that are built from now on may have other settings; those that live keep theirs."""
    from kvtune.plugin.core import state
    from kvtune.plugin.vllm.plugin_state import STATE

    books = state.books()
    STATE.reset()
    state.use(books)
