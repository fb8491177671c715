"""Settings of a replay. Plain data, sent to a simulator process as JSON; no vLLM."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvtune.fake_device.copies import CopyTime
from kvtune.fake_device.cost import NOMINAL, StepCost

Mode = Literal["exact", "jump"]

MODES: tuple[Mode, ...] = ("exact", "jump")


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated engine.

    model: what `vllm serve` takes, or a built-in name.
    engine_args: vLLM's own flags.
    specs: KV specs captured from a real run (`header.engine.kv_specs`); the model is then not built.
    async_scheduling: None takes vLLM's default on this machine; GPU engines run with True.
    block_tokens: tokens per block, where this machine's attention kernels would choose another size.
    like_device: the device of --like-device whose chunk, seats and blocks the engine has without `specs`; "": here.
    memory_bytes: the device's memory, which sizes the pool if no flag does; 0: a flag or `specs` sizes it.
    from_recipe: settings of vLLM among `engine_args` that a recipe gives.
    digests: keep one number per step, of what was scheduled into which blocks.
    shortcuts: simulate stock by kvtune's steady-decode path: the same decisions (a test compares them) in less time.
    verdicts: listen for `kvtune explain`; where each prompt's tokens went is added to header.extra.
    token_rows: leave out the tokens table of a workload that generates more tokens than this.
    copy: the time of copies to and from a tier of host memory (--kv-offloading-size).
    requests: positions in the workload of the only requests to replay; empty: replay all.
    at_once: limit of requests in flight, below the workload's own limit; 0: only the workload's limit holds.
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
    like_device: str = ""
    memory_bytes: int = 0
    from_recipe: list[str] = []
    digests: bool = False
    shortcuts: bool = True
    verdicts: bool = False
    token_rows: int = 4_000_000
    copy: CopyTime = CopyTime()
    requests: list[int] = []
    at_once: int = 0
