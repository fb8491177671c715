"""The first section: what to try, with its command, the run's main figures, and where its prompt tokens went."""

from __future__ import annotations

from collections.abc import Iterator

from kvtune.base.units import count, ms, percent, size
from kvtune.data.run.types import Run, untimed
from kvtune.data.show.parts import Section, Tile
from kvtune.reading.analysis.again import with_remedy
from kvtune.reading.analysis.figures import FIGURES, OBJECTIVES
from kvtune.reading.analysis.replayed import brings, helping, needs
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.sections.cache import bar
from kvtune.reading.report.sections.fleet import tiles as fleet_tiles

PLACE = 0
SHOWN = 2
"""Settings that help shown besides the best one, which the advice names."""
MOST_ROUNDS = 4
"""Only the table of rounds shows hit rates of more rounds than this."""


def section(analysis: RunAnalysis) -> Section:
    run, verdict = analysis.run, analysis.verdict
    figures = tiles(analysis)
    if peak := sum(memory.rss_peak_bytes for memory in analysis.memory.values()):
        figures.append(Tile("Memory", size(peak), "sum of the processes' peaks of RSS"))
    replayed = run.header.extra.replayed
    helps = helping(replayed) if replayed is not None else []
    others = [remedy for remedy in helps if with_remedy(run, remedy) != verdict.command][:SHOWN]
    notes = [f"Also: {verdict.also}." if verdict.also else "", verdict.without]
    notes += [
        f"{brings(remedy, replayed)}: {remedy.change} ({needs(remedy)})" for remedy in others if replayed
    ]
    return Section(
        "verdict",
        "What to change",
        verdict.advice,
        tiles=tuple(figures),
        facts=tuple(_ran(run)),
        notes=tuple(filter(None, notes)),
        draw=lambda: (bar(analysis.prefix_cache),),
        commands=(verdict.command,),
    )


def _ran(run: Run) -> Iterator[tuple[str, str]]:
    h, requests = run.header, f"{count(len(run.table('requests')['id']))} requests"
    yield "Load", h.workload.spec or h.workload.name
    engine = (f"vLLM {h.engine.vllm}" if h.engine.vllm else "", h.engine.device, h.engine.pool)
    yield "Engine", ", ".join(filter(None, (*engine, requests)))


def tiles(analysis: RunAnalysis) -> list[Tile]:
    """Return the run's main figures, for its page and for a terminal's first screen."""
    times, cache, good = analysis.latency, analysis.prefix_cache, analysis.goodput
    made = []
    if why := untimed(analysis.run.header):
        made.append(Tile("Times", "none", f"({why}; --like RUN replays at a run's speed)"))
    if times.throughput_tok_s is not None:
        rate = FIGURES[OBJECTIVES["throughput"]].text(times.throughput_tok_s)
        made.append(
            Tile("Output", rate, f"({count(times.output_tokens)} tokens in {ms(times.wall_s * 1000)})")
        )
    for name, spread in (("First token", times.ttft_ms), ("Between tokens", times.itl_ms)):
        if spread.p50 is not None and spread.p99 is not None:
            made.append(Tile(name, ms(spread.p50), f"median, p99 {ms(spread.p99)}"))
    if cache.query_tokens:
        share_of = f"of {count(cache.query_tokens)} prompt tokens hit{_by_round(analysis)}"
        made.append(Tile("Prefix cache", percent(cache.hit_tokens, cache.query_tokens), share_of))
    if (again := analysis.preemption) is not None:
        cost = (
            f", {count(again.tokens)} tokens computed twice"
            if again.tokens is not None
            else "; tokens computed twice were not recorded"
        )
        share = f", {percent(again.share)} of all computed" if again.share is not None else ""
        made.append(
            Tile("Preempted", count(again.requests), f"requests, {count(again.preemptions)} x{cost}{share}")
        )
    if analysis.fleet is not None:
        made += fleet_tiles(analysis.fleet)
    core = next((c for key, c in analysis.collectors.items() if key.startswith("engine_core")), None)
    if core is not None and core.share_of_step is not None and analysis.run.header.source != "sim":
        made.append(Tile("Collector", percent(core.share_of_step, digits=2), "of EngineCore's step time"))
    if good is not None and good["share"] is not None:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in good["slo"].items())
        rate = f"{good['requests_s']:.3g} /s, " if good["requests_s"] is not None else ""
        made.append(Tile("Goodput", percent(good["share"]), f"of requests, {rate}within {limits}"))
    if unfinished := times.requests - times.finished:
        made.append(Tile("Not finished", count(unfinished), f"of {count(times.requests)} requests sent"))
    return made


def _by_round(analysis: RunAnalysis) -> str:
    rates = [f"{100 * r.hit_tokens / max(r.query_tokens, 1):.1f}" for r in analysis.rounds]
    return f"; by round {', '.join(rates)} %" if 1 < len(rates) <= MOST_ROUNDS else ""
