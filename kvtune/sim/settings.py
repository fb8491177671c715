"""What a replay runs with. Plain data that crosses the pipe to a simulator process as JSON; no vLLM."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvtune.sim.cost import NOMINAL, StepCost

Mode = Literal["exact", "jump", "coarse"]

MODES: tuple[Mode, ...] = ("exact", "jump", "coarse")

COARSE_BLOCK = 128
"""Tokens of a block in coarse mode, where the engine's own blocks are smaller."""

COARSE_CHUNKS = 4
"""Chunks of a prompt that coarse mode takes at once, where no layer has a window or a state that they decide about."""


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated engine.

    model: what `vllm serve` takes or a built-in name. engine_args: vLLM's own flags. specs: captured from a real run
    (`header.engine.kv_specs`), instead of building the model. async_scheduling None: as vLLM's configuration says on
    this machine; True is what GPU engines do. block_tokens: tokens of a block, where this machine's attention kernels
    would choose other ones. digests: keep one number a step (what was scheduled into which blocks). shortcuts: take
    kvtune's steady-decode path under stock, too: the same decisions (its contract, and a test here) in less time.
    """

    model: str
    engine_args: list[str] = []
    core: Literal["kvtune", "stock"] = "stock"
    core_settings: dict[str, Any] = {}
    mode: Mode = "exact"
    cost: StepCost = NOMINAL
    specs: dict[str, Any] = {}
    async_scheduling: bool | None = None
    block_tokens: int | None = None
    digests: bool = False
    shortcuts: bool = True
    verdicts: bool = False  # listen for `kvtune explain`: where each prompt's tokens went, in header.extra
    token_rows: int = 4_000_000  # the tokens table is left out above this many generated tokens
