"""A run's summary for a terminal, with rich; plain text where there is none. Runs in the parent process.

In: the `--json` object of a run (kvtune.analysis.summary). Styles never carry meaning alone, so that NO_COLOR
and pipes lose nothing.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from kvtune.report.console.collector import collector_details
from kvtune.report.console.offload import offload_view
from kvtune.report.console.stalls import stalls_view
from kvtune.report.names import busiest, process_title
from kvtune.run.misses import cause_title
from kvtune.terminal import Column, FittedTable, command, console
from kvtune.units import count, ms, percent, size

if TYPE_CHECKING:
    from rich.console import RenderableType

Summary = Mapping[str, Any]
PIPE_WIDTH = 110  # columns where there is no terminal
LATENCIES = (("ttft_ms", "first token"), ("itl_ms", "between tokens"), ("e2e_ms", "whole request"))


def summary_text(summary: Summary, *, width: int = 100) -> str:
    """The summary as plain text: for files, pipes and tests."""
    out = io.StringIO()
    console(width, file=out).print(summary_view(summary), crop=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def print_summary(summary: Summary, file: IO[str] | None = None, *, first_screen: bool = False) -> None:
    """Print the summary, coloured on a terminal unless NO_COLOR is set."""
    view = screen_view(summary) if first_screen else summary_view(summary)
    console(PIPE_WIDTH, file=file).print(view, crop=False)


def screen_view(summary: Summary) -> RenderableType:
    """For a terminal of 24 lines: the engine, five figures, what limits it, what to try and what that brings."""
    from rich.console import Group

    parts = [_beside(summary), _head(summary), *_warnings(summary), _figures(summary), _verdict(summary)]
    return Group(*(part for part in parts if part is not None))


def summary_view(summary: Summary) -> RenderableType:
    """The whole summary as one rich renderable."""
    from rich.console import Group

    parts = [_beside(summary), _head(summary), *_warnings(summary), _figures(summary)]
    parts += [_latency(summary), *stalls_view(summary, _table)]
    parts += [
        _rounds(summary),
        _cache(summary),
        offload_view(summary, _table),
        _gc(summary),
        *collector_details(summary, _table),
        _host(summary),
        _ceiling(summary),
        _memory(summary),
    ]
    parts.append(_verdict(summary))
    return Group(*(part for part in parts if part is not None))


def _beside(s: Summary) -> RenderableType | None:
    from rich.text import Text

    return Text(s["beside"], style="bold") if s.get("beside") else None


def _figures(s: Summary) -> RenderableType:
    from rich.text import Text

    cache, core = s.get("prefix_cache") or {}, (s.get("gc") or {}).get("engine_core") or {}
    queries, tokens = cache.get("query_tokens", 0), s.get("output_tokens", 0)
    rows = {}
    if s.get("wall_s"):
        rows["output"] = (
            f"{_number(s.get('throughput_tok_s'))} tok/s: {count(tokens)} tokens in {ms(s['wall_s'] * 1000)}"
        )
    for key, name in LATENCIES[:2]:
        if (values := s.get(key)) and values.get("p50") is not None:
            rows[name] = f"{ms(values['p50'])} median, {_ms(values.get('p99'))} p99"
    if queries:
        rates = [f"{100 * r['hit_tokens'] / max(r['query_tokens'], 1):.1f}" for r in s.get("rounds") or []]
        by_round = f"; by round {', '.join(rates)} %" if 1 < len(rates) <= SHOWN_ROUNDS else ""
        rows["prefix cache"] = (
            f"{percent(cache['hit_tokens'], queries)} of {count(queries)} prompt tokens hit{by_round}"
        )
    if core.get("share_of_step") is not None and s.get("source") != "sim":
        rows["collector"] = f"{percent(core['share_of_step'], 1)} of EngineCore's step time"
    if (good := s.get("goodput")) and good.get("share") is not None:
        limits = ", ".join(f"{name} <= {limit:g} ms" for name, limit in good["slo"].items())
        rows["goodput"] = (
            f"{100 * good['share']:.1f} % of requests, {good['requests_s']:.3g} /s, within {limits}"
        )
    text = Text()
    for name, value in rows.items():
        text.append(f"\n  {name:<16}", style="dim").append(value)
    return text


def _head(s: Summary) -> RenderableType:
    from rich.text import Text

    engine = s.get("engine", {})
    places = {"sim": " (predicted by the simulator)", "host": " (no model: a simulated device)"}
    predicted = places.get(s.get("source", ""), "")
    head = Text()
    head.append(f"{s.get('model', '')}{predicted}", style="bold")
    head.append(f"  {s.get('workload', {}).get('spec') or s.get('workload', {}).get('name', '')}\n")
    where = ", ".join(
        text
        for text in (
            f"{count(s.get('requests', 0))} requests",
            f"vLLM {engine.get('vllm', '')}" if engine.get("vllm") else "",
            str(engine.get("device", "")),
            f"{count(engine.get('num_blocks', 0))} blocks of {engine.get('block_size', 0)} tokens",
        )
        if text
    )
    head.append(where, style="dim")
    return head


def _warnings(s: Summary) -> list[RenderableType]:
    from rich.text import Text

    lines = []
    state = s.get("state", "complete")
    if state != "complete":
        lines.append(f"This run is {state}. {s.get('why', '')}".rstrip())
    valid = s.get("valid", {})
    if not valid.get("timings", True) and s.get("source") != "sim":
        lines.append(f"Do not trust the times: {valid.get('why', '')}")
    core = s.get("core", {})
    if core.get("name") == "kvtune" and core.get("active") is False:
        lines.append(f"kvtune's core was not active, this is stock vLLM: {core.get('why', '')}")
    lines += [f"Note: {note}" for note in s.get("notes", [])]
    return [Text(f"! {line}", style="yellow") for line in lines]


def _latency(s: Summary) -> RenderableType | None:
    rows = [
        (name, _ms(values.get("mean")), _ms(values.get("p50")), _ms(values.get("p99")))
        for key, name in LATENCIES
        if (values := s.get(key)) and values.get("mean") is not None
    ]
    return _table(("latency", "mean", "median", "p99"), rows)


def _rounds(s: Summary) -> RenderableType | None:
    rows = [
        (
            f"round {number}",
            count(r["query_tokens"]),
            count(r["hit_tokens"]),
            percent(r["hit_tokens"], r["query_tokens"]),
            _ms(r.get("ttft_ms_mean")),
        )
        for number, r in enumerate(s.get("rounds") or [], start=1)
    ]
    return _table(("rounds", "prompt tokens", "hits", "hit rate", "first token"), rows)


def _cache(s: Summary) -> RenderableType | None:
    cache = s.get("prefix_cache") or {}
    queries = cache.get("query_tokens", 0)
    if not queries:
        return None
    rows = [("hit", count(cache["hit_tokens"]), percent(cache["hit_tokens"], queries))]
    rows += [
        (cause_title(cause), count(tokens), percent(tokens, queries))
        for cause, tokens in sorted((cache.get("misses") or {}).items(), key=lambda item: -item[1])
        if tokens
    ]
    return _table(("prefix cache", "prompt tokens", "share"), rows)


def _gc(s: Summary) -> RenderableType | None:
    rows = []
    for process, collector in (s.get("gc") or {}).items():
        pause = collector.get("pause_ms", {})
        collections = "/".join(count(n) for n in collector.get("collections", []))
        share = collector.get("share_of_step")
        rows.append(
            (
                process_title(process),
                collections,
                _ms(pause.get("total")),
                _ms(collector.get("cpu_ms")),
                _ms(pause.get("max")),
                "–" if share is None else percent(share, 1),
                "–" if collector.get("frozen") is None else count(collector["frozen"]),
            )
        )
    return _table(("collector", "gen 0/1/2", "pauses", "CPU time", "longest", "of step time", "frozen"), rows)


PHASES = {"execute": "waiting for the model", "other": "rest of the step"}


def _host(s: Summary) -> RenderableType | None:
    host = s.get("host_us") or {}
    names = (
        ("schedule", "schedule a step"),
        ("update", "update after it"),
        ("per_request_step", "per request and step"),
    )
    rows = [(title, _ms(host[key] / 1000)) for key, title in names if host.get(key) is not None]
    objects = s.get("objects_per_step") or {}
    rows += [
        (f"objects kept, {PHASES.get(phase, phase)}", f"{made:+,.1f} a step")
        for phase, made in objects.items()
    ]
    if overlap := s.get("overlap"):
        rows.append(("EngineCore's own work, a step", _ms(overlap["host_ms"])))
        rows.append(("the device, a step", _ms(overlap["device_ms"])))
        rows.append(("the device waited for the host", percent(overlap["exposed_share"], digits=0)))
    return _table(("host cost", "mean"), rows)


def _ceiling(s: Summary) -> RenderableType | None:
    ceiling = s.get("ceiling")
    if not ceiling:
        return None
    titles = {"front_end": busiest(len(ceiling.get("front_ends_us") or ()))}
    rows = [
        (
            f"{titles.get(name) or process_title(name)}{', which sets it' if name == ceiling['process'] else ''}",
            f"{value:.1f} µs",
        )
        for name, value in ceiling["cpu_us_per_token"].items()
        if value is not None
    ]
    rows += [
        (f"of EngineCore's: {phase}", f"{value:.1f} µs") for phase, value in ceiling["phases_us"].items()
    ]
    heading = f"host ceiling: {count(ceiling['tokens_s'])} tokens/s"
    return _table((heading, "CPU a token"), rows)


def _memory(s: Summary) -> RenderableType | None:
    rows = [
        (process_title(process), size(peak))  # the contract: memory{process: rss_peak_bytes}
        for process, used in (s.get("memory") or {}).items()
        if (peak := used.get("rss_peak_bytes") if isinstance(used, Mapping) else used)
    ]
    return _table(("memory", "peak RSS"), rows)


def _verdict(s: Summary) -> RenderableType | None:
    from rich.console import Group
    from rich.text import Text

    verdict = s.get("verdict") or {}
    if not isinstance(verdict, Mapping) or not verdict.get("limit"):
        return None
    text = Text()
    text.append(f"{verdict['limit']} ", style="bold")
    text.append(str(verdict.get("advice", "")))
    line = [command(f"  {verdict['command']}", "cyan")] if verdict.get("command") else []
    others = [
        Text(f"  {one['brings']}: {one['change']}")
        for one in (s.get("replayed") or {}).get("remedies", ())
        if one["command"] != verdict.get("command")
    ]
    also = [Text(f"Also: {verdict['also']}.")] if verdict.get("also") else []
    return Group(Text(), text, *line, *also, *others[:SHOWN_REMEDIES])


SHOWN_ROUNDS = 4
SHOWN_REMEDIES = 2
"""Remedies shown besides the best one, which the verdict names."""


PATHS = ("made at", "where")
DROPPED = ("CPU time", "frozen", "made at", "where", "median")
"""Columns that are left out on a narrow terminal, the last one first."""


def _table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> RenderableType | None:
    from rich.padding import Padding

    if not rows:
        return None
    title, *others = heads
    columns = [Column(title, folds=True, least=14)]
    columns += [
        Column(head, folds=head in PATHS, rank=1 + DROPPED.index(head) if head in DROPPED else 0)
        for head in others
    ]
    return Padding(FittedTable(columns, rows), (1, 0, 0, 0))


def _ms(value: float | None) -> str:
    return "–" if value is None else ms(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
