"""What a tier of host memory of a size holds, worked out from Facts; and when it can give nothing back. Pure.

The tier keeps chunks, one or more blocks of one KV cache group under one key. A chunk takes the bytes of a block of the
pool, over all layers that it spans, rounded up to pages of memory, whatever its group fills of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from kvtune.doctor.facts import Facts, Group
from kvtune.doctor.finding import Finding
from kvtune.units import count, percent, size

GIB = 1 << 30
PAGE = 4096
SIZE = "kv-offloading-size"
WRITES_ALL = ("lru", "arc")
"""Policies that store whatever is computed."""


@dataclass(frozen=True, slots=True)
class Tier:
    """`prompts`: so many of the longest requests fit, as vLLM stores them."""

    size_bytes: int
    chunks: int
    chunk_bytes: int
    blocks_per_chunk: int
    policy: str
    prompts: int

    def padding(self, group: Group, layers: int) -> float:
        """The part of a chunk that the group leaves empty. `layers`: of the group."""
        return 1 - self.blocks_per_chunk * group.used_bytes * layers / self.chunk_bytes


def tier_of(facts: Facts) -> Tier | None:
    """The tier of these flags; None without one, or where the model's blocks are not known."""
    try:
        size_bytes = int(float(facts.given.get(SIZE, "0")) * GIB)
        transfer = json.loads(facts.given.get("kv-transfer-config") or "{}")
        extra = transfer.get("kv_connector_extra_config") or {}
        per_chunk = max(1, int(extra.get("blocks_per_chunk", 1)))
        policy = str(extra.get("eviction_policy", "lru"))
    except (ValueError, TypeError, AttributeError):
        return None
    if size_bytes <= 0 or not facts.block_bytes:
        return None
    chunk_bytes = -(-facts.block_bytes * per_chunk // PAGE) * PAGE
    chunks = size_bytes // chunk_bytes
    needed = sum(_chunks(group, facts.max_model_len, per_chunk) for group in facts.groups)
    return Tier(size_bytes, chunks, chunk_bytes, per_chunk, policy, chunks // needed if needed else 0)


def _chunks(group: Group, tokens: int, per_chunk: int) -> int:
    """Chunks of one prompt: all of it, its last window, or its last state."""
    if group.kind == "state":
        return 1
    chunk = group.block_tokens * per_chunk
    return -(-min(tokens, group.window or tokens) // chunk) if chunk else 0


def tier_lines(facts: Facts) -> Iterator[tuple[str, str]]:
    """Names and values for the report."""
    tier = tier_of(facts)
    if tier is None:
        return
    times = (
        f", {tier.chunks * tier.blocks_per_chunk / facts.pool_blocks:.3g}x the pool"
        if facts.pool_blocks
        else ""
    )
    blocks = "a block" if tier.blocks_per_chunk == 1 else f"{tier.blocks_per_chunk} blocks"
    yield (
        "host memory",
        f"{size(tier.size_bytes)}: {count(tier.chunks)} chunks of {size(tier.chunk_bytes)}{times}; a chunk has "
        f"{blocks} of one group; room for {count(tier.prompts)} prompts of {count(facts.max_model_len)} tokens",
    )
    for kind, group in {_kind(group): group for group in facts.groups}.items():
        many = sum(_kind(other) == kind for other in facts.groups)
        held = count(group.block_tokens * tier.blocks_per_chunk)
        yield (
            "",
            f"{kind}: {f'{many} groups, each ' if many > 1 else ''}{held} tokens a chunk, "
            f"{percent(tier.padding(group, group.layers))} padding",
        )


def _kind(group: Group) -> str:
    return group.kind + (f" of {group.window}" if group.window else "")


def tier_inert(facts: Facts) -> Iterator[Finding]:
    """Sizes and settings with which a tier gives nothing, or hardly anything, back."""
    tier = tier_of(facts)
    if tier is None:
        return
    if not facts.caching:
        yield Finding(
            "warning",
            "host memory",
            "prefix caching is off: the tier only serves requests that were preempted",
            "--enable-prefix-caching, or leave the tier out",
        )
    if not tier.chunks:
        yield Finding(
            "error",
            "host memory",
            f"{size(tier.size_bytes)} is less than a chunk of {size(tier.chunk_bytes)}: nothing can be stored",
            f"--{SIZE} {_gib(tier.chunk_bytes * 1000)} has room for a thousand",
        )
    elif (
        tier.policy in WRITES_ALL
        and facts.pool_blocks
        and tier.chunks * tier.blocks_per_chunk <= facts.pool_blocks
    ):
        yield Finding(
            "warning",
            "host memory",
            f"the tier has room for {count(tier.chunks * tier.blocks_per_chunk)} blocks, the pool for "
            f"{count(facts.pool_blocks)}: vLLM stores what is computed, so that both hold the same, and the tier has "
            "next to nothing that the pool has lost",
            f"--{SIZE} {_gib(4 * facts.pool_blocks * tier.chunk_bytes / tier.blocks_per_chunk)} is 4x the pool; what "
            "a size is worth for a load: `kvtune bounds -w LOAD --tier 1x,2x,4x,8x`",
        )
    stored_sparsely = facts.hybrid or (facts.windowed and tier.policy in WRITES_ALL)
    if facts.caching and facts.retention == 0 and stored_sparsely:
        kept = "windows" if facts.windowed else "states"
        widest = max((group.window for group in facts.groups), default=0) or facts.hit_tokens
        unit = max(facts.hit_tokens * tier.blocks_per_chunk, 1)
        yield Finding(
            "warning",
            "host memory",
            f"{kept} are stored at the end of a prompt only: prompts with a shared prefix and new suffixes find "
            "next to nothing in host memory",
            f"--prefix-cache-retention-interval {-(-widest // unit) * unit}"
            + ("" if facts.hybrid else ", or the eviction policy kvtune, which stores others, too"),
        )


def _gib(wanted: float) -> str:
    return f"{wanted / GIB:.3g}"
