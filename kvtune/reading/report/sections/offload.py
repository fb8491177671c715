"""The tier (host memory): hits, copies in both directions, evictions. Only for runs with a tier."""

from __future__ import annotations

from kvtune.base.units import count, ms, percent, size
from kvtune.data.show.parts import Section, grid
from kvtune.reading.analysis.offload import CopyTotals, Offload
from kvtune.reading.analysis.run import RunAnalysis

PLACE = 40


def section(analysis: RunAnalysis) -> Section | None:
    tier = analysis.offload
    if tier is None:
        return None
    hits = percent(tier.tier_hit_tokens, tier.prompt_tokens)
    lead = f"The second tier, in host memory, gave back {hits} of the prompt tokens."
    if tier.copies is not None and tier.copies.stored_chunks:
        unread = percent(tier.copies.unread_chunks, tier.copies.stored_chunks)
        lead += f" Of what was stored in it, {unread} was not read again in this run."
    title = f"host memory: {size(tier.tier_bytes)}, {tier.policy}"
    rows = [*_hits(tier), *(_copies(tier.copies) if tier.copies is not None else ())]
    table = grid((title, "amount", "share or time"), rows, title)
    return Section("offload", "KV cache tier in host memory", lead, tables=(table,))


def _hits(tier: Offload) -> list[tuple[str, str, str]]:
    return [
        (name, f"{count(tokens)} tokens", percent(tokens, tier.prompt_tokens))
        for name, tokens in (
            ("hit in the KV cache", tier.pool_hit_tokens),
            ("hit in host memory", tier.tier_hit_tokens),
            ("computed", tier.computed_tokens),
        )
    ]


def _copies(copies: CopyTotals) -> list[tuple[str, str, str]]:
    stored, unread = copies.stored_chunks, copies.unread_chunks
    waits = f"{ms(copies.wait_s * 1000)} in all, {ms(copies.longest_wait_s * 1000)} the longest"
    rows = [
        ("copied to host memory", size(copies.stored_bytes), ms(copies.store_s * 1000)),
        ("copied back", size(copies.loaded_bytes), ms(copies.load_s * 1000)),
        (
            "stored and never read again",
            f"{count(unread)} of {count(stored)} chunks",
            percent(unread, stored),
        ),
        ("evicted from host memory", f"{count(copies.evicted_chunks)} chunks", ""),
        ("requests waited for copies", f"{count(copies.loads)} loads", waits),
    ]
    return rows + ([("no room to store", f"{count(copies.refused)} times", "")] if copies.refused else [])
