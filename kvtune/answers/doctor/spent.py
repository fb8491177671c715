"""Where the bytes of a KV cache go: what vLLM reserves for one request of max_model_len, and which flag frees how much.

Arithmetic on a report's groups by vLLM's rules of reservation; tests compare it with what vLLM says of the same flags.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, lcm

import msgspec

from kvtune.answers.doctor.facts import Facts, Group, Refusal
from kvtune.base.units import count
from kvtune.data.layout.plan import GPU

SMALL_CHUNK = 2_048
"""The chunk that vLLM takes on most devices, for `freed`."""


class Freed(msgspec.Struct, frozen=True, kw_only=True):
    """What a change of flags makes of one request of max_model_len. `bytes`: that it takes less; below 0: more."""

    change: str
    bytes: int
    cost: str


def blocks_of(group: Group, facts: Facts, tokens: int, in_flight: int) -> int:
    """Return the blocks that vLLM reserves in a group for one request of `tokens`."""
    if group.kind == "full attention":
        return ceil(tokens / group.block_tokens)
    if group.kind in ("sliding window", "chunked attention"):
        windowed = group.kind == "sliding window"
        held = min(group.window - windowed + in_flight, tokens)
        return ceil(held / group.block_tokens) + windowed
    if group.kind == "state":
        return 1 + (facts.caching and facts.state_mode == "align") + facts.draft_tokens
    return group.request_blocks or 1


def request_blocks(facts: Facts, tokens: int = 0, in_flight: int = -1) -> int:
    """Return the blocks of one request of `tokens`, in all groups; 0 tokens: of max_model_len."""
    flying = facts.in_flight_tokens if in_flight < 0 else in_flight
    return sum(blocks_of(group, facts, tokens or facts.max_model_len, flying) for group in facts.groups)


def judged(facts: Facts) -> Facts:
    """Return facts of the arithmetic with what its pool holds: vLLM's "KV cache size", or the refusal to start."""
    page, given = facts.bytes_of_block, facts.given
    blocks, size_bytes = (
        given.get(name, "") for name in ("num-gpu-blocks-override", "kv-cache-memory-bytes")
    )
    pool = (
        int(blocks) if blocks.isdigit() else int(size_bytes) // page if size_bytes.isdigit() and page else 0
    )
    one = request_blocks(facts)
    if not pool or not one:
        return facts
    if pool - 1 < one:  # one block is vLLM's null block
        low, high = 0, facts.max_model_len
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if request_blocks(facts, middle) < pool else (low, middle)
        held = (pool * page if blocks else int(size_bytes)) - page
        refusal = Refusal(needed_bytes=one * page, pool_bytes=held, longest=low)
        return msgspec.structs.replace(facts, refusal=refusal)
    fit = int(pool / one * facts.max_model_len)
    return msgspec.structs.replace(facts, pool_blocks=pool, pool_bytes=pool * page, tokens_fit=fit)


def freed(facts: Facts) -> Iterator[Freed]:
    """Yield what flags would free of one request of max_model_len, the most first."""
    now, page = request_blocks(facts), facts.bytes_of_block
    chunk, flying = facts.batched_tokens, facts.in_flight_tokens
    windows = any(group.window for group in facts.groups)
    changes = []
    if windows and flying > chunk > 0:
        less = (now - request_blocks(facts, in_flight=chunk)) * page
        changes.append(
            Freed(change="--no-async-scheduling", bytes=less, cost="the device waits for the host")
        )
    if windows and chunk > SMALL_CHUNK:
        less = (now - request_blocks(facts, in_flight=flying // chunk * SMALL_CHUNK)) * page
        changes.append(
            Freed(change=f"--max-num-batched-tokens {SMALL_CHUNK}", bytes=less, cost="more steps a prompt")
        )
    if facts.kv_cache_dtype in ("auto", "bfloat16", "float16") and (half := _in_fp8(facts)) is not None:
        grown = half.block_tokens > facts.block_tokens
        cost = (
            f"the block becomes {count(half.block_tokens)}: shorter prompts stop hitting"
            if grown
            else "precision"
        )
        less = now * page - request_blocks(half) * half.bytes_of_block
        changes.append(Freed(change="--kv-cache-dtype fp8", bytes=less, cost=cost))
    states = [group for group in facts.groups if group.kind == "state"]
    if states and facts.draft_tokens:
        less = len(states) * facts.draft_tokens * page
        changes.append(Freed(change="no --speculative-config", bytes=less, cost="no draft tokens"))
    if states and facts.caching:
        changes.append(
            Freed(change="--no-enable-prefix-caching", bytes=len(states) * page, cost="nothing hits")
        )
    yield from sorted(changes, key=lambda change: -change.bytes)


def _in_fp8(facts: Facts) -> Facts | None:
    """Return the facts with keys and values of half the bytes, if what is kept is two bytes an element; else None."""
    attention = [group for group in facts.groups if group.kind not in ("state", "ring buffer", "other")]
    if not attention or any("MLA" in name for group in facts.groups for name in group.specs):
        return None
    state = next((group for group in facts.groups if group.kind == "state"), None)
    tokens = facts.block_tokens
    if state is not None:
        token = attention[0].used_bytes // attention[0].block_tokens // 2
        step = lcm(facts.default_block_tokens or GPU.default, facts.state_step)
        tokens = step * ceil(state.used_bytes / (step * token))
    scale = tokens / facts.block_tokens if state is not None else 1
    groups = [msgspec.structs.replace(g, block_tokens=int(g.block_tokens * scale)) for g in facts.groups]
    page = int(facts.bytes_of_block * scale / 2)
    return msgspec.structs.replace(facts, groups=groups, block_tokens=tokens, pool_block_bytes=page)
