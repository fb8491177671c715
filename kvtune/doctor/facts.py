"""The facts about a model under given flags that `kvtune doctor` judges, as plain data.

Filled by a child process that has vLLM (doctor_probe), or from config.json alone where vLLM is missing.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

GroupKind = Literal["full attention", "sliding window", "state", "other"]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group: layers that share a block table. Bytes are of one block in one layer."""

    kind: GroupKind
    layers: int
    block_tokens: int
    page_bytes: int  # what a block takes in each layer
    used_bytes: int  # of it, what holds keys and values, or a state
    window: int = 0


class Visits(msgspec.Struct, frozen=True, kw_only=True):
    """What replaying short visits through vLLM's scheduler showed: hit tokens of each visit."""

    prefix_tokens: int
    suffix_tokens: int
    hit_tokens: list[int]  # by visit, the first is cold


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """`source`: `vllm` resolved the settings, or only `config` was read (then caching and floors are computed)."""

    source: Literal["vllm", "config"]
    model: str
    architecture: str = ""
    device: str = ""
    dtype: str = ""
    avx512_bf16: bool | None = (
        None  # the CPU has it (or is said to): states are float32. None: the device is no CPU
    )
    assumed: str = ""  # what a `config` source took for granted of the machine, in words
    state_dtype: str = ""  # of recurrent states; empty where there are none
    model_state_block_tokens: int = (
        0  # the block with states of the model's own type, where the CPU's rule raises it
    )
    state_dtype_flag: str = ""  # what gives it; empty: no flag does
    kv_cache_dtype: str = ""
    given: dict[str, str] = {}  # flags that the person gave, without dashes
    max_model_len: int = 0
    batched_tokens: int = 0  # max_num_batched_tokens: the longest chunk of a step
    max_requests: int = 0
    caching: bool = True
    block_tokens: int = 0
    kernel_refusal: str = ""  # why no attention kernel takes this block size
    default_block_tokens: int = 0  # what the backend takes when nothing is asked for
    state_mode: str = ""  # mamba_cache_mode: none, align, all
    match_unit: int = 0  # as asked for; 0: not
    retention: int | None = None
    hash_tokens: int = 0
    hit_tokens: int = 0  # hits land on multiples of this
    groups: list[Group] = []
    group_layers: int = 0  # layers that a block of the pool spans
    pool_blocks: int = 0  # 0: only a started engine knows
    pool_bytes: int = 0
    tokens_fit: int = 0  # of requests of the greatest length, all together
    gpu_block_tokens: int = 0  # the planner's answer for a GPU, where this host has none
    packing_refusal: str = ""  # why this engine could not have packed blocks (core.packed)
    shared_prefix: list[Visits] = []
    resent: list[Visits] = []
    log: list[str] = []  # vLLM's own lines about block sizes and padding
    config: dict[str, Any] = {}

    @property
    def hybrid(self) -> bool:
        return any(group.kind == "state" for group in self.groups)

    @property
    def windowed(self) -> bool:
        return any(group.kind == "sliding window" for group in self.groups)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool, all layers that it spans."""
        return max((group.page_bytes for group in self.groups), default=0) * self.group_layers
