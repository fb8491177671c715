"""Where the bytes of a KV cache go: what vLLM reserves for one request of max_model_len, and which flag frees how much.

Arithmetic on a report's groups by vLLM's rules of reservation; tests compare it with what vLLM says of the same flags.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from math import ceil, lcm

import msgspec

from kvtune.answers.doctor.facts import Facts, Group, Refusal
from kvtune.base.units import count
from kvtune.data.flags import flag_number

SMALL_CHUNK = 2_048
"""The chunk that vLLM takes on most devices, for `freed`."""


class Freed(msgspec.Struct, frozen=True, kw_only=True):
    """What a change of flags makes of one request of max_model_len. `bytes`: that it takes less; below 0: more."""

    change: str
    bytes: int
    cost: str


def blocks_of(group: Group, tokens: int, in_flight: int) -> int:
    """Return the blocks that vLLM reserves in a group for one request of `tokens`."""
    if group.kind == "full attention":
        return ceil(tokens / group.block_tokens)
    if group.window:
        sliding = group.kind == "sliding window"
        return ceil(min(group.window - sliding + in_flight, tokens) / group.block_tokens) + sliding
    return group.request_blocks or 1


def request_blocks(facts: Facts, tokens: int = 0, in_flight: int = 0) -> int:
    """Return the blocks of one request in all groups. 0 tokens: of max_model_len; 0 in flight: as many as vLLM has."""
    held = (tokens or facts.max_model_len, in_flight or facts.in_flight_tokens)
    return sum(blocks_of(group, *held) for group in facts.groups)


def judged(facts: Facts) -> Facts:
    """Return facts of the arithmetic with what the pool of its flags holds, or with vLLM's refusal to start."""
    page, needed = facts.bytes_of_block, request_blocks(facts)
    groups = [
        msgspec.structs.replace(
            group, request_blocks=blocks_of(group, facts.max_model_len, facts.in_flight_tokens)
        )
        for group in facts.groups
    ]
    facts = msgspec.structs.replace(facts, groups=groups)
    given = flag_number(facts.given, "num-gpu-blocks-override", 0) * page
    given = given or flag_number(facts.given, "kv-cache-memory-bytes", 0)
    blocks = given // page if page else 0
    if not blocks or not needed:
        return facts
    if blocks > needed:  # one block is vLLM's null block
        fit = int(blocks / needed * facts.max_model_len)
        return msgspec.structs.replace(facts, pool_blocks=blocks, pool_bytes=blocks * page, tokens_fit=fit)
    longest = bisect_right(
        range(1, facts.max_model_len), given // page - 1, key=lambda tokens: request_blocks(facts, tokens)
    )
    refusal = Refusal(needed_bytes=needed * page, pool_bytes=given - page, longest=longest)
    return msgspec.structs.replace(facts, refusal=refusal)


def freed(facts: Facts) -> Iterator[Freed]:
    """Yield what flags would free of one request of max_model_len, the most first."""
    now, page = request_blocks(facts), facts.bytes_of_block
    chunk, flying = facts.batched_tokens, facts.in_flight_tokens
    less: list[tuple[str, int, str]] = []
    if any(group.window for group in facts.groups):
        fewer = {
            "--no-async-scheduling": chunk,
            f"--max-num-batched-tokens {SMALL_CHUNK}": flying * SMALL_CHUNK // max(chunk, 1),
        }
        less = [
            (flag, (now - request_blocks(facts, 0, left)) * page, "more time a prompt")
            for flag, left in fewer.items()
            if 0 < left < flying
        ]
    if facts.kv_cache_dtype in ("auto", "bfloat16", "float16") and (half := _in_fp8(facts)) is not None:
        block = half.block_tokens
        cost = (
            f"the block becomes {count(block)}: shorter prompts stop hitting"
            if block > facts.block_tokens
            else "precision"
        )
        less.append(("--kv-cache-dtype fp8", now * page - request_blocks(half) * half.bytes_of_block, cost))
    for change, size_bytes, cost in sorted(less, key=lambda each: -each[1]):
        yield Freed(change=change, bytes=size_bytes, cost=cost)


def _in_fp8(facts: Facts) -> Facts | None:
    """Return the facts with keys and values of half the bytes; None where vLLM has other rules (latent, packed)."""
    attention = [group for group in facts.groups if group.kind in ("full attention", "sliding window")]
    if not attention or len(facts.groups) > len(attention) + sum(
        group.kind == "state" for group in facts.groups
    ):
        return None
    if any("MLA" in name for group in facts.groups for name in group.specs):
        return None
    tokens = facts.block_tokens
    if facts.hybrid:
        state = max(group.used_bytes for group in facts.groups if group.kind == "state")
        token = attention[0].used_bytes // attention[0].block_tokens // 2
        step = lcm(facts.default_block_tokens or 1, facts.state_step)
        tokens = step * ceil(state / (step * token))
    scale, layers = tokens / facts.block_tokens, facts.bytes_of_block // attention[0].page_bytes
    groups = [msgspec.structs.replace(g, block_tokens=round(g.block_tokens * scale)) for g in facts.groups]
    page = layers * round(attention[0].used_bytes * scale / 2)
    return msgspec.structs.replace(facts, groups=groups, block_tokens=tokens, pool_block_bytes=page)
