"""Settings of a replay. Plain data, sent to a simulator process as JSON; no vLLM."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvtune.fake_device.copies import CopyTime
from kvtune.fake_device.cost import NOMINAL, StepCost

Mode = Literal["exact", "jump"]

MODES: tuple[Mode, ...] = ("exact", "jump")

Router = Literal["", "round-robin", "session", "least-busy", "prefix", "given"]

GIVEN: Router = "given"

ROUTERS: tuple[Router, ...] = ("round-robin", "session", "least-busy", "prefix")
"""What a user may choose; sim/routers.py has them."""


class SimSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one simulated engine and of its replay.

    model: what `vllm serve` takes, or a built-in name.
    engine_args: vLLM's own flags.
    specs: KV specs captured from a real run (`header.engine.kv_specs`); the model is then not built.
    async_scheduling: None: vLLM's default on this machine; engines on GPUs use True.
    block_tokens: tokens per block; None: as this machine's attention kernels choose.
    like_device: the device (--like-device) whose default batch limits and block size the engine gets; "": this one.
    memory_bytes: the device's memory, which sizes the pool if no flag does; 0: a flag or `specs` sizes the pool.
    from_recipe: names of the vLLM settings in `engine_args` that come from a recipe.
    digests: record a checksum of each step's scheduled tokens and block ids.
    shortcuts: use the faster code of `fast/`, which makes the same decisions (a test compares them).
    verdicts: for `kvtune explain`, add to header.extra why each prompt's tokens hit or missed.
    token_rows: leave out the tokens table of a workload that generates more tokens than this.
    copy: the time of copies to and from a tier of host memory (--kv-offloading-size).
    requests: positions in the workload of the requests to replay; empty: all requests.
    at_once: the most requests in flight, if lower than the workload's own limit; 0: the workload's limit.
    replicas: engines like this one that share the load, each with its own cache.
    router: which of them gets a request (sim/routers.py). Empty: one engine, and no router.
    routed: for router "given", each request's replica, in workload order.
    end_s: the replay ends at this time of its clock, with requests in flight and unsent; 0: when all have finished.
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
    end_s: float = 0.0
    replicas: int = 1
    router: Router = ""
    routed: list[int] = []
