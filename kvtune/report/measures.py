"""Titles and units of the figures that runs are compared by; a figure is a path into the `--json` object."""

from __future__ import annotations

from collections.abc import Iterable

from kvtune.analysis.comparison.compare import ONE_RUN, Figure
from kvtune.report.names import process_title
from kvtune.units import ms, size

NOUNS = {"ttft_ms": "time to first token", "itl_ms": "time between tokens", "e2e_ms": "whole request"}
STATISTICS = {"mean": "mean", "p50": "median", "p99": "p99"}
SHARES = ("prefix_cache.hit_rate",)  # differences in percentage points, not in percent of percent
TITLES = {
    "throughput_tok_s": "output throughput",
    "goodput.requests_s": "goodput",
    "ceiling.tokens_s": "host ceiling, tokens/s",
    "prefix_cache.hit_rate": "prefix cache hit rate",
    "host_us.per_request_step": "host cost per request and step",
}

DRIFT = "Times of one run a side are not judged: the machine's own drift between two runs can be as large."


def measure_title(path: str) -> str:
    """A figure's title; the path itself where it has none."""
    if path in TITLES:
        return TITLES[path]
    head, *rest = path.split(".")
    if head in NOUNS and len(rest) == 1:
        return f"{NOUNS[head]}, {STATISTICS.get(rest[0], rest[0])}"
    if head == "gc" and rest[-1:] and rest[-1] in ("total", "max"):
        return (
            f"{process_title(rest[0])}'s collector pauses, {'summed' if rest[-1] == 'total' else 'longest'}"
        )
    if head == "gc" and rest[-1:] == ["collections_total"]:
        return f"{process_title(rest[0])}'s collections"
    if head == "memory" and len(rest) == 1:
        return f"{process_title(rest[0])}'s peak memory"
    return path


def measure_text(path: str, value: float | None, *, signed: bool = False) -> str:
    """A value of that figure with its unit; with `signed` as a difference."""
    if value is None:
        return "–"
    sign = "+" if signed and value > 0 else ""
    if path == "prefix_cache.hit_rate":
        return f"{sign}{100 * value:.1f} {'points' if signed else '%'}"
    if path.startswith("memory."):
        return f"{sign}{size(value)}"
    if path.endswith("_tok_s"):
        return f"{sign}{value:,.4g} tok/s"
    if path.startswith("host_us."):
        return f"{sign}{ms(value / 1000)}"
    return f"{sign}{ms(value)}" if "_ms" in path else f"{sign}{value:,.4g}"


def change_text(figure: Figure) -> str:
    """The difference relative to the first run's value, or absolute if that value is zero or a share."""
    if figure.relative is None or figure.path in SHARES:
        return measure_text(figure.path, figure.difference, signed=True)
    return f"{100 * figure.relative:+.1f} %"


def interval_text(figure: Figure) -> str:
    """The interval of the difference; a dash where there is none (`figure.why` says why)."""
    if figure.low is None or figure.high is None:
        return "–"
    if figure.a and figure.path not in SHARES:
        return " to ".join(f"{100 * end / abs(figure.a):+.1f} %" for end in (figure.low, figure.high))
    low, high = (measure_text(figure.path, v, signed=True) for v in (figure.low, figure.high))
    return f"{low} to {high}"


def reasons(figures: Iterable[Figure]) -> list[str]:
    """Why figures are not judged: one line per reason, with its figures."""
    titles_of: dict[str, list[str]] = {}
    for figure in figures:
        if figure.why:
            titles_of.setdefault(figure.why, []).append(measure_title(figure.path))
    return [
        DRIFT if why == ONE_RUN else f"Not judged: {', '.join(titles)} ({why})."
        for why, titles in titles_of.items()
    ]
