"""The first section: three sentences with a command, then the run's main figures as tiles."""

from __future__ import annotations

from dataclasses import dataclass

from kvtune.analysis.again import with_remedy
from kvtune.analysis.replayed import beside, brings, helping
from kvtune.analysis.run import RunAnalysis
from kvtune.report.charts import Cell, Grid, Section, grid
from kvtune.run.types import Run
from kvtune.units import count, ms, percent, size


@dataclass(frozen=True, slots=True)
class Tile:
    name: str
    value: str
    more: str = ""


def section(analysis: RunAnalysis) -> Section:
    values: dict[str, object] = {
        "verdict": analysis.verdict,
        "remedies": _remedies(analysis.run),
        "without_effect": _without_effect(analysis.run),
        "figures": _figures(analysis),
    }
    return Section("verdict", "What to change", beside(analysis.run), "verdict.html", values)


def _remedies(run: Run) -> Grid | None:
    """The settings that help, as they were replayed."""
    told = run.header.extra.replayed
    if told is None or not (best := helping(told)):
        return None
    rows = [
        (
            one.change,
            Cell(brings(one, told), one.gain_tokens),
            Cell(percent(one.hit_tokens, told.query_tokens), one.hit_tokens),
            one.cost or "nothing",
            with_remedy(run, one),
        )
        for one in best
    ]
    return grid(("setting", "brings", "hits", "takes", "command"), rows, "Settings that help, each replayed")


def _without_effect(run: Run) -> str:
    told = run.header.extra.replayed
    if told is None:
        return ""
    best = helping(told)
    others = [one.change for one in told.remedies if one not in best and not one.error]
    return f"Replayed too, and under a point: {'; '.join(others)}." if others else ""


def _figures(analysis: RunAnalysis) -> list[Tile]:
    times, cache = analysis.latency, analysis.prefix_cache
    tiles = []
    if times.throughput_tok_s is not None:
        tiles.append(
            Tile("Output", f"{times.throughput_tok_s:,.4g} tok/s", f"{ms(times.wall_s * 1000)} of wall time")
        )
    if times.ttft_ms.p50 is not None and times.ttft_ms.p99 is not None:
        tiles.append(Tile("First token, median", ms(times.ttft_ms.p50), f"p99 {ms(times.ttft_ms.p99)}"))
    if times.itl_ms.p50 is not None and times.itl_ms.p99 is not None:
        tiles.append(Tile("Between tokens, median", ms(times.itl_ms.p50), f"p99 {ms(times.itl_ms.p99)}"))
    if cache.query_tokens:
        of = f"{count(cache.hit_tokens)} of {count(cache.query_tokens)} prompt tokens"
        tiles.append(Tile("Prefix cache hits", percent(cache.hit_tokens, cache.query_tokens), of))
    core = next((c for key, c in analysis.collectors.items() if key.startswith("engine_core")), None)
    if core is not None and core.share_of_step is not None:
        tiles.append(
            Tile("Collector pauses", percent(core.share_of_step, digits=2), "of EngineCore's step time")
        )
    peak = sum(m.rss_peak_bytes for m in analysis.memory.values())
    if peak:
        tiles.append(Tile("Memory, all processes", size(peak), "sum of the peaks of RSS"))
    unfinished = times.requests - times.finished
    if unfinished:
        tiles.append(Tile("Not finished", count(unfinished), f"of {count(times.requests)} requests sent"))
    return tiles
