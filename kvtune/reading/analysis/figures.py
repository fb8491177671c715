"""Every figure that runs are judged by: title, unit, whether more is better, meaning. For page, terminal and tune.

A key is a path into the `--json` object, with `*` for a process (`gc.*.pause_ms.total`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvtune.base.units import ms, number, percent, size
from kvtune.reading.analysis.processes import process_title


@dataclass(frozen=True, slots=True)
class Unit:
    """`text` formats a value with its unit. A stored value times `scale` is in the unit `name`."""

    name: str
    text: Callable[[float], str]
    scale: float = 1.0
    of_difference: str = ""
    """The unit of a difference, if it is not the value's unit."""


SHARE = Unit("%", percent, 100.0, "points")
MILLISECONDS = Unit("ms", ms)
MICROSECONDS = Unit("µs", lambda value: ms(value / 1000))
SECONDS = Unit("s", lambda value: ms(value * 1000))
BYTES = Unit("bytes", size)
TOKENS_S = Unit("tok/s", lambda value: f"{number(value)} tok/s")
REQUESTS_S = Unit("requests/s", lambda value: f"{number(value)} requests/s")
NUMBER = Unit("", number)


@dataclass(frozen=True, slots=True)
class Quantity:
    """`title`: name in a sentence. `head`: name above a column. `better`: 1 if more is better, -1 if less is."""

    title: str
    unit: Unit
    better: int
    meaning: str
    head: str = ""

    @property
    def short(self) -> str:
        return self.head or self.title

    @property
    def head_with_unit(self) -> str:
        return f"{self.short} ({self.unit.name})" if self.unit.name else self.short

    def text(self, value: float | None, *, signed: bool = False) -> str:
        """Format a value with its unit, or a difference if `signed`."""
        if value is None:
            return "–"
        sign = "+" if signed and value > 0 else ""
        if signed and self.unit.of_difference:
            return f"{sign}{self.unit.scale * value:.1f} {self.unit.of_difference}"
        return f"{sign}{self.unit.text(value)}"

    def scaled(self, value: float) -> float:
        """Convert a stored value to the unit of `head_with_unit`."""
        return self.unit.scale * value

    def number(self, value: float | None) -> str:
        """Format a stored value in the unit of `head_with_unit`, without the unit's name."""
        return "–" if value is None else number(self.scaled(value))


TIMES = {
    "ttft_ms": ("time to first token", "first token", "from sending a request to its first token"),
    "itl_ms": ("time between tokens", "between tokens", "between two tokens of a request"),
    "tpot_ms": ("time per token", "a token", "a request's time after its first token, over its other tokens"),
    "e2e_ms": ("whole request", "whole request", "from sending a request to its last token"),
}
STATISTICS = {"mean": "mean", "p50": "median", "p99": "p99"}

FIGURES = {
    **{
        f"{key}.{statistic}": Quantity(f"{title}, {name}", MILLISECONDS, -1, meaning, head)
        for key, (title, head, meaning) in TIMES.items()
        for statistic, name in STATISTICS.items()
    },
    "throughput_tok_s": Quantity(
        "output throughput", TOKENS_S, 1, "output tokens of all requests over the wall time", "output"
    ),
    "goodput.requests_s": Quantity(
        "goodput", REQUESTS_S, 1, "requests a second that met every limit of --slo"
    ),
    "prefix_cache.hit_rate": Quantity(
        "prefix cache hit rate", SHARE, 1, "share of the prompt tokens that the cache had", "hit rate"
    ),
    "offload.tier_hit_rate": Quantity(
        "hit rate of host memory", SHARE, 1, "share of the prompt tokens that only host memory had"
    ),
    "offload.copies.stored_bytes": Quantity("copied to host memory", BYTES, -1, "KV blocks that were stored"),
    "offload.copies.loaded_bytes": Quantity("copied back", BYTES, 1, "KV blocks that host memory gave back"),
    "offload.copies.wait_s": Quantity(
        "waits for copies", SECONDS, -1, "time in which requests waited for copies"
    ),
    "host_us.per_request_step": Quantity(
        "host cost per request and step", MICROSECONDS, -1, "schedule and update, over the requests of a step"
    ),
    "ceiling.tokens_s": Quantity(
        "host ceiling", TOKENS_S, 1, "output tokens that this host can drive at most, whatever the device"
    ),
    "ceiling.cpu_us_per_token.*": Quantity(
        "{}'s CPU time per token", MICROSECONDS, -1, "CPU time of the process"
    ),
    "gc.*.collections_total": Quantity("{}'s collections", NUMBER, -1, "runs of Python's garbage collector"),
    "gc.*.pause_ms.total": Quantity("{}'s collector pauses, summed", MILLISECONDS, -1, "time in collections"),
    "gc.*.pause_ms.max": Quantity(
        "{}'s collector pauses, longest", MILLISECONDS, -1, "the longest collection"
    ),
    "memory.*": Quantity("{}'s peak memory", BYTES, -1, "peak of the resident memory (RSS)"),
}

OBJECTIVES = {
    "hit-rate": "prefix_cache.hit_rate",
    "ttft": "ttft_ms.mean",
    "throughput": "throughput_tok_s",
    "goodput": "goodput.requests_s",
    "ceiling": "ceiling.tokens_s",
}
"""The values of `--objective`, and the figure of each."""

OF_RECIPES = (*OBJECTIVES.values(), "e2e_ms.mean")
"""Figures of the engine runs that a recipe keeps as evidence."""


def quantity(path: str) -> Quantity:
    """Return the figure at a path; a path that is not in FIGURES gets a plain number without a unit."""
    if path in FIGURES:
        return FIGURES[path]
    parts = path.split(".")
    for place, part in enumerate(parts[1:], start=1):
        figure = FIGURES.get(".".join((*parts[:place], "*", *parts[place + 1 :])))
        if figure is not None:
            return replace(figure, title=figure.title.format(process_title(part)))
    return Quantity(path, NUMBER, 0, "")
