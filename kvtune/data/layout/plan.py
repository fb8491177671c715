"""Plans block sizes of hybrid attention + state-space models from their shapes. No vLLM, no torch; runs anywhere.

Two rules determine the legal block sizes. Per layer (vLLM's): one attention layer's page of a block holds one state.
Aggregate (core.packed): all attention layers' pages of a block together hold k states. A `BlockPlan` says what a size
costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, lcm, prod

from kvtune.base.errors import UsageError
from kvtune.data.installed import keeps_states_in_chunks
from kvtune.data.platforms import Platform

STATES_HELD_RUNNING = 2
"""State blocks per state group that a running request holds: one to read from and one to write to."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a state (convolution window or recurrent state) on one rank."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.element_bytes


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties that decide a model's KV layout on one rank. `states`: one layer's state of one sequence.

    `window_layers` attend to the last `window` tokens only, `attention_layers` to all tokens. `latent`: the elements
    of MLA's one vector for a token, which every rank keeps whole; 0: keys and values of heads. `delta_heads`: the size
    of a key's head in layers with Qwen's gated delta net; 0: there are none. `state_dtype`: the states' data type.
    """

    name: str
    attention_layers: int
    kv_heads: int
    head_dim: int
    kv_element_bytes: int
    state_layers: int = 0
    states: tuple[StateTensor, ...] = ()
    window_layers: int = 0
    window: int = 0
    latent: int = 0
    delta_heads: int = 0
    state_dtype: str = ""

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of the keys and values of one token in one attention layer."""
        return (self.latent or 2 * self.kv_heads * self.head_dim) * self.kv_element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in all full-attention layers."""
        return self.attention_layers * self.layer_token_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state in one state layer."""
        return sum(state.size_bytes for state in self.states)

    @property
    def hybrid(self) -> bool:
        return self.state_layers > 0 and self.attention_layers > 0


@dataclass(frozen=True, slots=True)
class Backend:
    """The block sizes of an attention backend: multiples of `alignment`; `default` if --block-size is not given.

    `kernel_blocks`: the block sizes that its kernels take; empty if they take every multiple. vLLM splits a block of
    stock's layout into such sizes. It cannot split a packed block, because its layers' pages lie side by side.
    `delta_step`: blocks of a model with Qwen's gated delta net are multiples of it, too, as vLLM's kernel keeps states
    only there. `delta_heads`: only if heads have this size; 0: any.
    """

    name: str
    alignment: int
    default: int
    kernel_blocks: tuple[int, ...] = ()
    delta_step: int = 1
    delta_heads: int = 0

    def state_step(self, shape: ModelShape) -> int:
        """Return the tokens whose multiples this model's blocks are for the sake of its states; 1: any."""
        delta = shape.delta_heads and self.delta_heads in (0, shape.delta_heads)
        return self.delta_step if delta else 1

    def takes_whole(self, tokens: int) -> bool:
        """Whether the kernels take a block of this size in one piece."""
        return not self.kernel_blocks or tokens in self.kernel_blocks


GPU = Backend("gpu", alignment=16, default=16)
FLASHINFER = Backend("FlashInfer", alignment=16, default=16, kernel_blocks=(16, 32, 64))
CPU = Backend("cpu", alignment=32, default=128)

BLACKWELL = 10
"""The major compute capability on which vLLM prefers FlashInfer to FlashAttention (only 10, not 12)."""
DELTA_KERNEL = {9: 0, 10: 128, 12: 128}
"""Major compute capability -> the heads (their size; 0: any) for which vLLM has FlashInfer's gated delta net."""
DELTA_STEP = 64
"""Tokens whose multiples are the places of states inside a chunk that this kernel can keep."""


def gpu_backend(attention: str, capability: int = 0, *, chunks: bool | None = None) -> Backend:
    """Return the backend of --attention-backend ("": vLLM's choice on a GPU of this major compute capability).

    `chunks`: states are kept in chunks, as in vLLM 0.33; None: if they are in the installed one.
    """
    chosen = attention.upper() or ("FLASHINFER" if capability == BLACKWELL else "")
    backend = FLASHINFER if chosen == "FLASHINFER" else GPU
    if capability not in DELTA_KERNEL or not (keeps_states_in_chunks() if chunks is None else chunks):
        return backend
    return replace(backend, delta_step=DELTA_STEP, delta_heads=DELTA_KERNEL[capability])


def backend_of(platform: Platform, attention: str = "") -> Backend:
    """Return the backend of an engine on this platform. `attention`: --attention-backend."""
    return CPU if platform.kind == "cpu" else gpu_backend(attention, platform.capability[0])


@dataclass(frozen=True, slots=True)
class Waste:
    """The bytes that a running sequence holds: useful ones, and waste by cause. The fields add up to all bytes."""

    useful: int  # keys and values of its tokens, and one state of each state layer
    state_slot: (
        int  # second slot of each state: vLLM writes the next state there while it reads the current one
    )
    page_pad: int  # in state blocks: bytes after the states
    padding: int  # layers (stock) or states (packed) that pad a group to full size
    tail: int  # in the last attention blocks: room for later tokens


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One legal block size, and what it costs.

    The pool allocates blocks of `block_bytes`, each to one group: to `block_tokens` tokens of `group_layers` layers, or
    to `states_per_block` states, each in `slot_bytes`.
    """

    shape: ModelShape
    block_tokens: int
    group_layers: int
    states_per_block: int
    slot_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.group_layers * (self.block_tokens * self.shape.layer_token_bytes or self.slot_bytes)

    @property
    def attention_groups(self) -> int:
        return ceil(self.shape.attention_layers / self.group_layers)

    @property
    def window_groups(self) -> int:
        return ceil(self.shape.window_layers / self.group_layers)

    @property
    def state_groups(self) -> int:
        return ceil(self.shape.state_layers / self.states_per_block)

    @property
    def groups(self) -> int:
        return self.attention_groups + self.window_groups + self.state_groups

    def request_blocks(self, tokens: int) -> int:
        """Return the number of blocks that a running sequence of `tokens` holds in all groups."""
        whole = self.attention_groups * ceil(tokens / self.block_tokens)
        kept = min(tokens, self.shape.window - 1) if self.shape.window else 0
        window = self.window_groups * (ceil(kept / self.block_tokens) + 1 if kept else 0)
        return whole + window + self.state_groups * STATES_HELD_RUNNING

    def waste(self, tokens: int) -> Waste:
        """Return the bytes that a running sequence of `tokens` holds, by use. UsageError for sliding-window models."""
        shape, held = self.shape, self.request_blocks(tokens) * self.block_bytes
        if shape.window_layers:
            raise UsageError(f"{shape.name} has sliding windows: waste by cause is not supported for them")
        blocks = ceil(tokens / self.block_tokens)
        attention, states = (
            blocks * self.block_tokens * shape.token_bytes,
            shape.state_layers * shape.state_bytes,
        )
        free_slots = self.state_groups * self.states_per_block - shape.state_layers
        padding = self.attention_groups * blocks * self.block_bytes - attention
        padding += STATES_HELD_RUNNING * free_slots * self.slot_bytes
        useful, second = tokens * shape.token_bytes + states, (STATES_HELD_RUNNING - 1) * states
        tail = attention - tokens * shape.token_bytes
        return Waste(useful, second, held - useful - second - padding - tail, padding, tail)


def least_block_tokens(shape: ModelShape, alignment: int) -> int:
    """Return the smallest block in tokens, per-layer rule: A * ceil(state / (A * bytes of a token in a layer))."""
    if not shape.hybrid:
        return alignment
    return alignment * ceil(shape.state_bytes / (alignment * shape.layer_token_bytes))


def plan_per_layer(shape: ModelShape, backend: Backend, requested: int | None = None) -> BlockPlan:
    """Return vLLM's plan for --block-size `requested` (None: the default): the smallest legal multiple of it.

    vLLM groups layers with equal pages: a group is as large as the rarest kind of layer, others are padded.
    """
    asked, step = backend.default if requested is None else requested, backend.alignment
    if asked < 1:
        raise UsageError(f"block size {asked} is not positive", "give --block-size 16 or more")
    if asked % step and not shape.hybrid:
        raise UsageError(
            f"block size {asked} is not a multiple of {step}: no {backend.name} kernel supports it",
            f"give --block-size {step * ceil(asked / step)}",
        )
    tokens = least_block_tokens(shape, lcm(max(step, asked), backend.state_step(shape)))
    tokens = step * ceil(tokens / step)
    kinds = (shape.attention_layers, shape.window_layers, shape.state_layers)
    if not any(kinds):
        raise UsageError(f"{shape.name} has no layers that keep a KV cache")
    rarest, most = min(filter(None, kinds)), max(kinds)
    group = most if most < 1.5 * rarest else rarest
    return BlockPlan(shape, tokens, group, group, tokens * shape.layer_token_bytes or shape.state_bytes)


def plan_aggregate(shape: ModelShape, backend: Backend, block_tokens: int) -> BlockPlan:
    """Return the plan of a block of `block_tokens` whose attention layers together hold as many states as fit."""
    if not shape.hybrid:
        raise UsageError(f"{shape.name} has no states: the aggregate rule needs attention and state layers")
    fit = min(block_tokens * shape.token_bytes // shape.state_bytes, shape.state_layers)
    if fit == 0:
        raise UsageError(
            f"{block_tokens} tokens of all {shape.attention_layers} attention layers do not hold one state",
            f"{shape.name} needs blocks of {least_aggregate_tokens(shape, backend)} tokens or more",
        )
    # Spread evenly: with 36 layers and room for 16, three groups of 12, not 16 + 16 + 4.
    even = ceil(shape.state_layers / ceil(shape.state_layers / fit))
    return BlockPlan(shape, block_tokens, shape.attention_layers, even, shape.state_bytes)


def least_aggregate_tokens(shape: ModelShape, backend: Backend, states: int = 1) -> int:
    """Return the smallest block (tokens) whose attention layers together hold `states` states."""
    step = lcm(backend.alignment, backend.state_step(shape))
    return step * ceil(states * shape.state_bytes / (step * shape.token_bytes))


def legal_per_layer(shape: ModelShape, backend: Backend, max_tokens: int) -> list[BlockPlan]:
    """Return the distinct plans that `--block-size` can lead to, up to blocks of `max_tokens`, smallest first."""
    sizes = range(backend.alignment, max_tokens + 1, backend.alignment)
    plans = {plan.block_tokens: plan for plan in (plan_per_layer(shape, backend, asked) for asked in sizes)}
    return [plans[tokens] for tokens in sorted(plans) if tokens <= max_tokens]


def legal_aggregate(shape: ModelShape, backend: Backend, max_tokens: int) -> list[BlockPlan]:
    """Return for each number of state groups the plan with the smallest block, of at most `max_tokens` tokens."""
    plans: dict[int, BlockPlan] = {}
    for states in range(1, shape.state_layers + 1):
        tokens = least_aggregate_tokens(shape, backend, states)
        if tokens > max_tokens:
            break
        plan = plan_aggregate(shape, backend, tokens)
        plans.setdefault(plan.state_groups, plan)
    return list(plans.values())


def packed_plans(shape: ModelShape, backend: Backend, max_tokens: int) -> dict[int, BlockPlan]:
    """Return the plan of each `core.states_per_block`, up to blocks of `max_tokens`; empty if none can be packed."""
    if packing_refusal(shape):
        return {}
    plans = [p for p in legal_aggregate(shape, backend, max_tokens) if backend.takes_whole(p.block_tokens)]
    return {min(plan.block_bytes // shape.state_bytes, shape.state_layers): plan for plan in plans}


def packing_refusal(shape: ModelShape) -> str:
    """Return why a model cannot have packed blocks in any engine; empty if it can."""
    if not shape.hybrid:
        return f"{shape.name} has no recurrent states beside attention"
    if shape.window_layers:
        return f"{shape.name} has sliding windows beside full attention: pages of several sizes"
    return ""


def sweep_candidates(shape: ModelShape, backend: Backend, longest: int, limit: int = 6) -> list[int]:
    """Return the `--block-size` values worth a trial: distinct legal sizes, each at least twice the one before.

    Sizes above the `longest` request (tokens) are left out: no prompt could hit.
    """
    chosen: list[int] = []
    for plan in legal_per_layer(shape, backend, longest):
        if not chosen or plan.block_tokens >= 2 * chosen[-1]:
            chosen.append(plan.block_tokens)
    return chosen[:limit]


def match_units(block_tokens: int, alignment: int) -> list[int]:
    """Return the `--prefix-match-unit` values for a block: multiples of `alignment` that divide it, finest first."""
    return [unit for unit in range(alignment, block_tokens, alignment) if block_tokens % unit == 0]
