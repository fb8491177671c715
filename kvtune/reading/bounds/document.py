"""What `kvtune bounds` says of a load: lengths, pauses and reuse; hit rates over pool sizes."""

from __future__ import annotations

from collections.abc import Iterator

from kvtune.base.units import count, number, percent, size
from kvtune.data.run.signature import identity
from kvtune.data.show.parts import Document, Section, grid_of
from kvtune.data.show.terminal import Column
from kvtune.reading.bounds.ladder import RUNGS, Bounds, Rung, TierRung
from kvtune.reading.bounds.loads import LoadFacts, Quantiles


def bounds_document(bounds: Bounds) -> Document:
    load = f"{count(bounds.requests)} requests, {count(bounds.prompt_tokens)} prompt tokens, "
    load += f"{count(bounds.load.output.total)} output tokens"
    notes = [f"upper bounds only: {bounds.relaxation}"] if bounds.relaxation else []
    rows = (_row(bounds, place, rung) for place, rung in enumerate(bounds.curve))
    sections = [
        Section("load", "The load", facts=tuple(_facts(bounds.load)), notes=tuple(bounds.load.notes)),
        Section(
            "curve",
            "Hits by the size of the pool",
            tables=(grid_of(rows),),
            notes=(*notes, *bounds.notes),
        ),
    ]
    tiers = [_tier_row(rung, tier) for rung in bounds.curve for tier in rung.tiers]
    if tiers:
        lead = "Hits of pool and tier together."
        sections.append(Section("tiers", "With a tier of host memory", lead, tables=(grid_of(tiers),)))
    return Document(
        name="kvtune bounds",
        subject=bounds.workload,
        headline=f"{bounds.workload}: {load}; an infinite cache hits {percent(bounds.infinite)} "
        f"(no evictions in {count(bounds.distinct_tokens)} tokens)",
        sections=tuple(sections),
        identity=identity("bounds", bounds.workload_hash, bounds.model, bounds.block_tokens),
        title=f"{bounds.workload} · bounds · kvtune",
    )


def _row(bounds: Bounds, place: int, rung: Rung) -> dict[str | Column, str]:
    start = {None: "infinite", 0.0: "0 s (LRU)"}.get(rung.head_start_s, f"{rung.head_start_s or 0:g} s")
    gap = rung.optimum - rung.lru
    larger = (
        other for other in bounds.curve[place + 1 :] if abs(other.pool_blocks - 2 * rung.pool_blocks) < 2
    )
    double = next(larger, None)
    more = f"{100 * (double.lru - rung.lru):+.1f} points" if double is not None else "–"
    return {
        "pool blocks": f"{rung.pool_blocks:,}",
        Column("memory", rank=3): size(rung.pool_bytes) if rung.pool_bytes else "–",
        RUNGS["lru"][0]: percent(rung.lru),
        RUNGS["best_known"][0]: percent(rung.best_known),
        RUNGS["optimum"][0]: percent(rung.optimum),
        Column("gap closed", rank=1): f"{100 * (rung.best_known - rung.lru) / gap:.0f} %"
        if gap > 1e-9
        else "–",
        Column("head start", rank=4): start,
        Column("LRU with 2x", rank=2): more,
    }


def _tier_row(rung: Rung, tier: TierRung) -> dict[str | Column, str]:
    return {
        "pool blocks": f"{rung.pool_blocks:,}",
        "tier": f"{tier.factor:g}x",
        Column("its memory", rank=1): size(tier.tier_bytes) if tier.tier_bytes else "–",
        Column("pool alone", rank=2): percent(rung.lru),
        "inclusive (vLLM's)": percent(tier.inclusive),
        "exclusive": percent(tier.exclusive),
        Column("optimum", rank=3): percent(tier.optimum),
    }


def _facts(load: LoadFacts) -> Iterator[tuple[str, str]]:
    yield "prompt tokens", _spread(load.prompt)
    yield "output tokens", _spread(load.output)
    if load.reuse_tokens is not None:
        yield "tokens used between two uses of a prefix", _spread(load.reuse_tokens)
    sessions = load.sessions
    if sessions is None:
        return
    yield "sessions", f"{sessions.sessions:,}; each {sessions.turns_a_minute:.1f} turns a minute"
    yield "turns of a session", _spread(sessions.turns)
    yield (
        "sub-agents",
        f"{sessions.subagents:,}; {sessions.joins:,} turns wait for several; {sessions.compactions:,} compactions",
    )
    if sessions.pauses is not None:
        cut = f"; {percent(sessions.cut_turns)} are cut to {sessions.max_think:g} s"
        yield "pauses, s", _spread(sessions.pauses) + cut
    if sessions.reuse_s is not None:
        yield "seconds until a prefix comes again, by tokens", _spread(sessions.reuse_s)
    if sessions.left_out_requests:
        yield (
            "left out as too long",
            f"{sessions.left_out_requests:,} requests, {sessions.left_out_sessions:,} sessions whole",
        )


def _spread(values: Quantiles) -> str:
    named = {
        "p25": values.p25,
        "median": values.p50,
        "p90": values.p90,
        "p99": values.p99,
        "most": values.most,
    }
    return ", ".join(f"{name} {number(value)}" for name, value in named.items())
