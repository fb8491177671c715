"""Compares the block layouts of a model with states: stock's, and packed ones with k states per block.

Pure arithmetic on plans (`plan.py`): what each layout costs, in what steps of tokens it hits, and which is recommended.
Hit shares assume an infinite cache with that block size: they are upper bounds. `kvtune sweep` replays the layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvtune.data.layout.plan import (
    Backend,
    BlockPlan,
    ModelShape,
    Waste,
    least_aggregate_tokens,
    match_units,
    packed_plans,
    packing_refusal,
    plan_per_layer,
)
from kvtune.requests.loads.prefix_tree import PrefixTree
from kvtune.requests.types import Workload

LEAST_CAPACITY = 0.98
"""Least capacity relative to stock's. A layout below it must save at least as much prompt work as it loses capacity."""

WORTH_SHARE = 0.01
"""The least gain in hits, as a share of the prompt tokens, that makes another layout worthwhile."""

REQUEST_TOKENS = 4096
"""Tokens of a request if no workload is given."""


@dataclass(frozen=True, slots=True)
class Load:
    """Token counts of a workload: `lengths` of whole requests, `shared` of the prefix each shares with earlier ones."""

    lengths: tuple[int, ...] = (REQUEST_TOKENS,)
    prompt_tokens: int = 0
    shared: tuple[int, ...] = ()
    name: str = ""

    def hit_share(self, block_tokens: int) -> float | None:
        """Return the share of prompt tokens that an infinite cache hits, or None if no workload was given."""
        if not self.prompt_tokens:
            return None
        return sum(tokens // block_tokens * block_tokens for tokens in self.shared) / self.prompt_tokens


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """One layout. `states_per_block`: of packed blocks. `requests_fit`: requests that run at once.

    `capacity`: `requests_fit` over stock's. `resend_tokens`: hits of a prompt sent again end at multiples of this, with
    --prefix-match-unit. `waste_bytes`: of a running request of mean length. `pareto`: no other layout is as good in
    block size, fit and groups, and better in one.
    """

    layout: Literal["stock", "packed"]
    states_per_block: int | None
    block_tokens: int
    block_bytes: int
    groups: int
    requests_fit: float
    capacity: float
    shared_prefix_tokens: int
    resend_tokens: int
    waste_bytes: Waste
    hit_share: float | None
    pareto: bool

    @property
    def name(self) -> str:
        return f"packed {self.states_per_block}" if self.states_per_block else "stock"


class Layouts(msgspec.Struct, frozen=True, kw_only=True):
    """A model's layouts, stock's first. `refusal`: why there are no packed blocks; stock's is then the only layout.

    `workload`: None if none was given.
    """

    pool_bytes: int
    request_tokens: int
    workload: str | None
    refusal: str
    rows: list[Layout]
    recommended: int
    why: str


def load_of(workload: Workload) -> Load:
    """Return the load of a workload, with the prefixes that an infinite cache would share."""
    tree, shared, lengths, prompts = PrefixTree(), [], [], 0
    for request in workload.requests:
        shared.append(min(tree.match(request.prompt), request.prompt_tokens - 1))
        tree.insert(request.prompt)
        lengths.append(request.prompt_tokens + request.output_tokens)
        prompts += request.prompt_tokens
    return Load(tuple(lengths), prompts, tuple(shared), workload.name) if lengths else Load()


def kernel_refusal(shape: ModelShape, backend: Backend) -> str:
    """Return why this backend's kernels take none of the model's packed blocks; empty if they take one."""
    if packing_refusal(shape) or not backend.kernel_blocks:
        return ""
    blocks = [least_aggregate_tokens(shape, backend, n) for n in range(1, shape.state_layers + 1)]
    if any(map(backend.takes_whole, blocks)):
        return ""
    legal = ", ".join(map(str, backend.kernel_blocks))
    return (
        f"the kernels of {backend.name} take blocks of {legal} tokens, and the smallest packed block has {blocks[0]}: "
        "FlashAttention and Triton take multiples of 16 (--attention-backend FLASH_ATTN)"
    )


def layouts_of(
    shape: ModelShape,
    backend: Backend,
    pool_bytes: int,
    *,
    load: Load | None = None,
    requested_block: int | None = None,
    refusal: str = "",
) -> Layouts:
    """Compare all layouts of a model with states in a pool of `pool_bytes`. `refusal`: why this engine cannot pack."""
    load = load or Load()
    stock = plan_per_layer(shape, backend, requested_block)
    refusal = refusal or packing_refusal(shape)
    plans = {} if refusal else packed_plans(shape, backend, stock.block_tokens - 1)
    every = [(0, stock), *((k, p) for k, p in plans.items() if p.block_tokens >= (requested_block or 0))]
    mean = round(sum(load.lengths) / len(load.lengths))
    fits = [_fit(plan, pool_bytes, load.lengths) for _, plan in every]
    merits = [(-plan.block_tokens, fit, -plan.groups) for (_, plan), fit in zip(every, fits, strict=True)]
    rows = [
        Layout(
            layout="packed" if states else "stock",
            states_per_block=states or None,
            block_tokens=plan.block_tokens,
            block_bytes=plan.block_bytes,
            groups=plan.groups,
            requests_fit=fit,
            capacity=fit / fits[0] if fits[0] else 0.0,
            shared_prefix_tokens=plan.block_tokens,
            resend_tokens=min(match_units(plan.block_tokens, backend.alignment), default=plan.block_tokens),
            waste_bytes=plan.waste(mean),
            hit_share=load.hit_share(plan.block_tokens),
            pareto=not any(_beats(other, merit) for other in merits),
        )
        for (states, plan), fit, merit in zip(every, fits, merits, strict=True)
    ]
    number, why = recommend(rows, refusal)
    return Layouts(
        pool_bytes=pool_bytes,
        request_tokens=mean,
        workload=load.name or None,
        refusal=refusal,
        rows=rows,
        recommended=number,
        why=why,
    )


def recommend(rows: Sequence[Layout], refusal: str = "") -> tuple[int, str]:
    """Return the index of the recommended layout, and why. It is stock's (0) if no other gains enough.

    Among layouts that hit about as much, the one with the fewest groups wins: each group costs host time per step.
    """
    stock = rows[0]
    if refusal:
        return 0, f"packed blocks are not available: {refusal}"
    if len(rows) == 1:
        return 0, "no packed block is smaller than stock's"
    allowed = [n for n, row in enumerate(rows) if n and (row.capacity >= LEAST_CAPACITY or pays(row, stock))]
    if not allowed:
        return 0, f"every packed layout holds less than {LEAST_CAPACITY:g}x of stock's requests" + (
            "" if stock.hit_share is None else ", and none saves as much prompt work as it costs capacity"
        )
    if stock.hit_share is None:
        return (
            0,
            "smaller blocks pay where prefixes are shared, and cost host time: give a workload (-w) to weigh them",
        )
    most = max(rows[n].hit_share or 0.0 for n in allowed)
    if most - stock.hit_share < WORTH_SHARE:
        return (
            0,
            f"smaller blocks gain this workload {100 * max(most - stock.hit_share, 0.0):.1f} points of hits at most",
        )
    near = [n for n in allowed if (rows[n].hit_share or 0.0) > most - WORTH_SHARE]
    best = min(near, key=lambda n: (rows[n].groups, -rows[n].capacity))
    row = rows[best]
    return best, (
        f"up to {row.hit_share or 0.0:.1%} of the prompt tokens can hit (stock's blocks: {stock.hit_share:.1%}), "
        f"with room for {row.capacity:.2f}x as many requests, in {row.groups} groups"
    )


def pays(row: Layout, stock: Layout) -> bool:
    """Whether hits make up for lost capacity: the prompt work shrinks by at least the same factor."""
    if row.hit_share is None or stock.hit_share is None:
        return False
    return 1.0 - row.hit_share <= row.capacity * (1.0 - stock.hit_share)


def _fit(plan: BlockPlan, pool_bytes: int, lengths: Sequence[int]) -> float:
    """Return how many requests of these lengths run at once, on average."""
    held = sum(plan.request_blocks(tokens) for tokens in lengths) / len(lengths)
    return max(pool_bytes // plan.block_bytes - 1, 0) / held


def _beats(merit: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return merit != other and all(a >= b for a, b in zip(merit, other, strict=True))
