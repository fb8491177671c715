"""Input and output of `kvtune bounds`: pool sizes, a model's shape, tables. In the CLI's process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from kvtune.bounds.ladder import RUNGS, Bounds, Rung
from kvtune.bounds.loads import LoadFacts, Quantiles
from kvtune.bounds.tiers import TierRung
from kvtune.engine.model_config import model_config
from kvtune.engine.models import NAMES, SHAPES, TINY
from kvtune.errors import UsageError, did_you_mean
from kvtune.layout.config import shape_of
from kvtune.layout.plan import ModelShape
from kvtune.terminal import Column, FittedTable, console, redraw
from kvtune.units import count, number, percent, size

_SUFFIX = {"k": 1_000, "m": 1_000_000}


def parse_pools(text: str) -> list[int]:
    """Parse `25k,100k` to [25000, 100000]; UsageError for anything but numbers of blocks."""
    pools = []
    for part in filter(None, (p.strip().lower() for p in text.split(","))):
        number, factor = (part[:-1], _SUFFIX[part[-1]]) if part[-1] in _SUFFIX else (part, 1)
        try:
            blocks = int(float(number) * factor)
        except (ValueError, OverflowError):
            blocks = 0
        if blocks < 1:
            raise UsageError(
                f"--pools: {part!r} is not a number of blocks", "for instance --pools 25k,100k,400k"
            )
        pools.append(blocks)
    return sorted(set(pools))


def parse_tiers(text: str) -> list[float]:
    """Parse `1x,2x,4x` to [1, 2, 4]; UsageError for anything but positive multiples."""
    factors = []
    for part in filter(None, (p.strip().lower() for p in text.split(","))):
        try:
            factor = float(part.removesuffix("x"))
        except ValueError:
            factor = 0.0
        if not 0 < factor < inf:
            raise UsageError(
                f"--tier: {part!r} is not a multiple of the pool", "for instance --tier 1x,2x,4x,8x"
            )
        factors.append(factor)
    return sorted(set(factors))


def shape_named(model: str) -> ModelShape:
    """Return the KV shape of a built-in model, a folder with config.json, or a name on the hub."""
    config = model_config(model)
    if not config.fields:
        raise UsageError(
            f"--model {model}: {config.why}",
            f"{did_you_mean(model, (*TINY, *SHAPES))}give a folder with config.json, or one of {', '.join(NAMES)}",
        )
    return shape_of(config.fields, model)


@contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """Show progress on stderr: on a terminal in one line that is removed at the end, else line by line."""
    terminal = sys.stderr.isatty()

    def say(text: str) -> None:
        redraw(text) if terminal else print(text, file=sys.stderr, flush=True)

    say("computing bounds ..")
    try:
        yield lambda number, of: say(f"pool sizes {number}/{of}")
    finally:
        if terminal:
            redraw("")


COLUMNS = (
    Column("pool blocks"),
    Column("memory", rank=3),
    *(Column(RUNGS[name][0]) for name in ("lru", "best_known", "optimum")),
    Column("gap closed", rank=1),
    Column("head start", rank=4),
    Column("LRU with 2x", rank=2),
)


TIER_COLUMNS = (
    Column("pool blocks"),
    Column("tier"),
    Column("its memory", rank=1),
    Column("pool alone", rank=2),
    Column("inclusive (vLLM's)"),
    Column("exclusive"),
    Column("optimum", rank=3),
)


def print_bounds(bounds: Bounds) -> None:
    out = console(120)
    out.print(
        f"{bounds.workload}: {count(bounds.requests)} requests, {count(bounds.prompt_tokens)} prompt tokens; "
        f"an infinite cache hits {percent(bounds.infinite)} (no evictions in {count(bounds.distinct_tokens)} tokens)"
    )
    rows = [_row(bounds, at, rung) for at, rung in enumerate(bounds.curve)]
    out.print(FittedTable(COLUMNS, rows, gap=2))
    behind = [_tier_row(rung, tier) for rung in bounds.curve for tier in rung.tiers]
    if behind:
        out.print("\nwith a host-memory tier: hits of pool and tier together")
        out.print(FittedTable(TIER_COLUMNS, behind, gap=2))
    if bounds.relaxation:
        out.print(f"upper bounds only: {bounds.relaxation}")
    for note in bounds.notes:
        out.print(f"note: {note}")


def _row(bounds: Bounds, at: int, rung: Rung) -> list[str]:
    start = {None: "infinite", 0.0: "0 s (LRU)"}.get(rung.head_start_s, f"{rung.head_start_s or 0:g} s")
    gap = rung.optimum - rung.lru
    double = next((r for r in bounds.curve[at + 1 :] if abs(r.pool_blocks - 2 * rung.pool_blocks) < 2), None)
    return [
        f"{rung.pool_blocks:,}",
        size(rung.pool_bytes) if rung.pool_bytes else "–",
        percent(rung.lru),
        percent(rung.best_known),
        percent(rung.optimum),
        f"{100 * (rung.best_known - rung.lru) / gap:.0f} %" if gap > 1e-9 else "–",
        start,
        f"{100 * (double.lru - rung.lru):+.1f} points" if double is not None else "–",
    ]


def _tier_row(rung: Rung, tier: TierRung) -> list[str]:
    return [
        f"{rung.pool_blocks:,}",
        f"{tier.factor:g}x",
        size(tier.tier_bytes) if tier.tier_bytes else "–",
        *(percent(share) for share in (rung.lru, tier.inclusive, tier.exclusive, tier.optimum)),
    ]


def load_lines(facts: LoadFacts) -> list[str]:
    """Return a load in words, a line a topic."""
    lines = [
        f"{facts.workload}: {count(facts.requests)} requests, {count(facts.prompt.total)} prompt tokens, "
        f"{count(facts.output.total)} output tokens",
        f"an infinite cache hits {percent(facts.infinite)} of the prompt tokens (blocks of {facts.block_tokens})",
        f"prompt tokens: {_spread(facts.prompt)}",
        f"output tokens: {_spread(facts.output)}",
    ]
    if facts.reuse_tokens is not None:
        lines.append(f"tokens used between two uses of a prefix: {_spread(facts.reuse_tokens)}")
    if (of := facts.sessions) is not None:
        lines += [
            f"{of.sessions:,} sessions: turns {_spread(of.turns)}; {of.turns_a_minute:.1f} turns a minute each",
            f"{of.subagents:,} sub-agents, {of.joins:,} turns wait for several, {of.compactions:,} compactions",
        ]
        if of.pauses is not None:
            lines.append(
                f"pauses in seconds: {_spread(of.pauses)}; {percent(of.cut_turns)} are cut to {of.max_think:g} s"
            )
        if of.reuse_s is not None:
            lines.append(f"seconds until a prefix comes again, by tokens: {_spread(of.reuse_s)}")
        if of.left_out_requests:
            lines.append(
                f"left out as too long: {of.left_out_requests:,} requests, {of.left_out_sessions:,} sessions whole"
            )
    return lines + [f"note: {note}" for note in facts.notes]


def _spread(of: Quantiles) -> str:
    named = {"p25": of.p25, "median": of.p50, "p90": of.p90, "p99": of.p99, "most": of.most}
    return ", ".join(f"{name} {number(value)}" for name, value in named.items())
