"""The facts about a model under given flags that the rules of `kvtune doctor` judge. Plain data.

Collected from vLLM by a child process (`child.py`), or planned from config.json (`planned.py`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvtune.data.layout.forms import Form
from kvtune.data.layout.idle import Idle
from kvtune.data.platforms import GIB

GroupKind = Literal["full attention", "sliding window", "chunked attention", "ring buffer", "state", "other"]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group: layers that share a block table. Sizes in bytes are per block and layer.

    The layers' pages may differ in size: then `page_bytes` and `used_bytes` are their averages.
    """

    kind: GroupKind
    layers: int
    block_tokens: int
    page_bytes: int
    used_bytes: int  # the part of a page that holds keys and values, or a state
    window: int = 0
    specs: list[str] = []  # names of vLLM's classes; empty if vLLM was not asked
    cached: bool = True  # whether vLLM caches prefixes of it
    backend: str = ""  # the attention backends of its layers
    draft_layers: int = 0  # those of them that are a drafter's
    request_blocks: int = 0  # what vLLM reserves for one request of max_model_len

    @property
    def token_bytes(self) -> int:
        """Bytes that a token adds for as long as its request runs; 0 where only the last tokens are kept."""
        grows = self.kind == "full attention" and self.block_tokens
        return self.layers * self.used_bytes // self.block_tokens if grows else 0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The pool holds no request of max_model_len: vLLM does not start. `longest`: the length that it would; 0: none."""

    needed_bytes: int
    pool_bytes: int
    longest: int

    @property
    def said(self) -> str:
        """What vLLM's message says."""
        length = f"; the longest that fits is {self.longest:,} tokens" if self.longest else ""
        return f"needs {gib(self.needed_bytes)} GiB of {gib(self.pool_bytes)}{length}"


def gib(size_bytes: int) -> str:
    """Return GiB as vLLM writes them."""
    return f"{round(size_bytes / GIB, 2)}"


class Visits(msgspec.Struct, frozen=True, kw_only=True):
    """Hit tokens of prompts that share a prefix, replayed one after another through vLLM's scheduler."""

    prefix_tokens: int
    suffix_tokens: int
    hit_tokens: list[int]  # of each visit; the first is cold


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a model. `source`: where they come from.

    `vllm`: from vLLM. `arithmetic`: planned from config.json, for the installed engine. `config`: planned from
    config.json, for an assumed machine.
    """

    source: Literal["vllm", "arithmetic", "config"]
    model: str
    architecture: str = ""
    device: str = ""
    dtype: str = ""
    avx512_bf16: bool | None = (
        None  # whether the CPU has it; if so, vLLM keeps states in float32. None: not a CPU
    )
    assumed: str = ""  # in words, the machine that was assumed when only config.json was read
    state_dtype: str = ""  # of recurrent states; empty without states
    model_state_block_tokens: int = (
        0  # block size with states of the model's own type, if float32 states make it larger
    )
    state_dtype_flag: str = ""  # the flag that sets that block size; empty: no flag does
    kv_cache_dtype: str = ""
    given: dict[str, str] = {}  # the user's flags, without dashes
    max_model_len: int = 0
    batched_tokens: int = 0  # max_num_batched_tokens: the longest chunk of a step
    max_requests: int = 0
    # Setting -> origin of its value: "flag", or vLLM's default with the device and the place in vLLM's code.
    origins: dict[str, str] = {}
    caching: bool = True
    block_tokens: int = 0
    kernel_refusal: str = ""  # why no attention kernel takes this block size; empty: one does
    default_block_tokens: int = 0  # the backend's, without --block-size
    state_step: int = 1  # tokens whose multiples blocks are, so that kernels keep states there
    state_mode: str = ""  # which states are kept: none, align
    match_unit: int = 0  # --prefix-match-unit; 0: not given
    retention: int | None = None
    hash_tokens: int = 0
    hit_tokens: int = 0  # hits end at multiples of this
    groups: list[Group] = []
    group_layers: int = 0  # layers of the largest group: a block of the pool has a page for each of them
    pool_block_bytes: int = 0  # of a block of the pool, by vLLM; 0: a page for each of `group_layers`
    pool_blocks: int = 0  # 0: known only once an engine has started
    pool_bytes: int = 0
    weight_bytes: int = 0  # of a rank, as stored; 0: not known
    in_flight_tokens: int = 0  # scheduled but not done at once, at most: a chunk for each batch
    draft_tokens: int = 0
    refusal: Refusal | None = None
    longest_run: int = (
        0  # tokens of the longest request that runs alone in the pool (replayed); 0: max_model_len
    )
    pool_why: str = ""  # how the device's memory sizes the pool, or why it does not; empty if a flag does
    tokens_fit: int = (
        0  # what vLLM prints as "KV cache size": max_model_len x the requests of that length that fit
    )
    idle: list[Idle] = []  # empty without vLLM's answers, or with prefix caching off
    next_block: int = 0  # block size in vLLM 0.33, if it is another one there
    gpu_block_tokens: int = 0  # planned block size on a GPU, if this host has no GPU
    packing_refusal: str = ""  # why core.packed cannot work in this engine
    shared_prefix: list[Visits] = []
    resent: list[Visits] = []
    # Of a model with states: how much of a prompt hits that is sent again, and of a prefix from the third prompt on
    # that shares it. None: no closed form holds.
    again: Form | None = None
    shared: Form | None = None
    checkpoints: bool = False  # whether states are kept where prompts part, to less than a block
    log: list[str] = []  # vLLM's own lines about block sizes and padding

    @property
    def hybrid(self) -> bool:
        return any(group.kind == "state" for group in self.groups)

    @property
    def windowed(self) -> bool:
        return any(group.kind == "sliding window" for group in self.groups)


class Facts(ModelFacts, frozen=True, kw_only=True):
    """The facts with the model's config.json, which no answer repeats."""

    config: dict[str, Any] = {}

    @property
    def bytes_of_block(self) -> int:
        """Bytes of one block of the pool, over all layers that it spans."""
        if self.pool_block_bytes:
            return self.pool_block_bytes
        return max((group.page_bytes for group in self.groups), default=0) * self.group_layers
