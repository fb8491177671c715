"""Facts from an engine run about the engine to simulate: step cost, pool, KV specs, scheduling. Pure."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import structs

from kvtune.analysis.study import Bench, Settings
from kvtune.engine.flags import flag_value
from kvtune.engine.like import copy_of
from kvtune.errors import KvtuneError
from kvtune.fake_device.copies import CopyTime
from kvtune.fake_device.cost import NOMINAL, StepCost
from kvtune.fake_device.fit import fit
from kvtune.knobs import keeps_specs
from kvtune.run.types import Run

POOL_FLAGS = ("num-gpu-blocks-override", "kv-cache-memory-bytes")


class EngineLike(msgspec.Struct, frozen=True, kw_only=True):
    """Facts from an engine run. Without facts (the default): nominal cost, the flags' pool, the model's specs.

    blocks: the run's pool, in blocks of `block_tokens` tokens. async_scheduling: None means vLLM's default here.
    """

    cost: StepCost = NOMINAL
    blocks: int = 0
    block_tokens: int = 0
    specs: dict[str, Any] = {}
    async_scheduling: bool | None = None
    copy: CopyTime = CopyTime()

    def pool_of(self, bench: Bench) -> Bench:
        """Return the bench with the run's pool size, unless the bench's own flags give a size."""
        if not self.blocks or gives_pool(bench):
            return bench
        flags = [*bench.engine_args, "--num-gpu-blocks-override", str(self.blocks)]
        return structs.replace(bench, engine_args=flags, block_tokens=self.block_tokens)

    def specs_for(self, settings: Settings) -> dict[str, Any]:
        """Return the run's KV specs, or {} if these settings change them."""
        return self.specs if all(map(keeps_specs, settings)) else {}


UNMEASURED = EngineLike()


def gives_pool(bench: Bench) -> bool:
    """Whether the bench's flags set the size of the KV cache."""
    return any(flag_value(bench.engine_args, name) is not None for name in POOL_FLAGS)


def like(run: Run) -> EngineLike:
    """Return the facts of a recorded run; the cost is nominal if the run was too short for a fit."""
    try:
        cost = fit(run)
    except KvtuneError:
        cost = NOMINAL
    engine = run.header.engine
    return EngineLike(
        cost=cost,
        blocks=engine.num_blocks,
        block_tokens=engine.block_size,
        specs=engine.kv_specs,
        async_scheduling=engine.async_scheduling,
        copy=copy_of(run),
    )
