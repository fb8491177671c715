"""Reads a server's `/metrics`, and the differences between two readings. Pure.

In: the text in Prometheus' format. Counters and buckets are summed over engines. A series that a server
does not publish is None, never 0. Prometheus allows NaN and infinity, a server's counts do not: they are refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtune.base.bounded import BeyondError, TooLongError, cpu_limit, decode_json_as, decode_metrics
from kvtune.base.legal import Value
from kvtune.data.show.terminal import one_line

PREFIX = "vllm:"
LABELS_OF_CACHE = "cache_config_info"
STARTED = "process_start_time_seconds"
DRAFTS = "spec_decode_num_drafts"
STORED = "kv_offload_store_bytes"
PROPOSED, ACCEPTED = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
CORE, CORE_SETTINGS = "kvtune_core_active", "kvtune_core_settings"
"""Series of a server that runs kvtune's plugin."""
CLOCK_S = 0.05
"""Largest difference of two readings of one process's start."""
WANTED = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_",
    "external_prefix_cache_",
    STORED,
    "prompt_tokens",
    "generation_tokens",
    "num_preemptions",
    *(DRAFTS, PROPOSED, ACCEPTED),
    "request_success",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    *("iteration_tokens_total_sum", "iteration_tokens_total_count"),
    *(
        f"request_{part}_time_seconds_{of}"
        for part in ("prefill", "decode", "inference")
        for of in ("sum", "count")
    ),
    *(f"e2e_request_latency_seconds_{of}" for of in ("sum", "count")),
    "request_prompt_tokens",
    "request_queue_time_seconds",
    LABELS_OF_CACHE,
)
"""Prefixes of the series that are read. The others, half of the text, are skipped."""
MOST_TEXT = 200_000
"""Most lines of an answer, of which half are read. An engine has about 300."""
READ_CPU_S = 3.0
"""CPU time in which an answer is read: the dearest one within the limits of lines took 0.7 s."""
MOST = 1 << 53
"""Largest value that is believed: beyond it, a float does not count by one."""
LONGEST = 300
"""Longest text of a label that is kept, in characters."""
MOST_SETTINGS = 4_000
"""Longest text of the core's settings that is read, in characters."""


class WrongValue(ValueError):
    """A value that no server of vLLM has."""


UNREADABLE = (ValueError, KeyError, IndexError, RecursionError, TooLongError)
"""What `read` raises for text in another format."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of /metrics, at time.time() `at`. `values`: by name, without `vllm:` and `_total`.

    `buckets`: by name, each bucket's count by its upper bound. `reasons`: waiting requests by reason. `cache`: the
    labels of cache_config_info. `started`: when the server's process started, in seconds since 1970.
    """

    at: float
    values: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]
    reasons: Mapping[str, float] = field(default_factory=dict)
    cache: Mapping[str, str] = field(default_factory=dict)
    model: str = ""
    engines: int = 1
    started: float | None = None
    core: Mapping[str, Value] | None = None
    """The settings of kvtune's core that are not its defaults, if the server runs the core; else None."""

    def get(self, name: str) -> float | None:
        return self.values.get(name)

    def whole(self, name: str) -> int | None:
        return None if (value := self.values.get(name)) is None else int(value)

    def number(self, label: str) -> int | None:
        """Return the number of a label of cache_config_info; None if it has none."""
        text = self.cache.get(label, "")
        return int(text) if text.isdecimal() and len(text) <= len(str(MOST)) else None

    @property
    def blocks(self) -> int | None:
        """Blocks of all engines' pools together: each engine reports this sum."""
        return self.number("num_gpu_blocks")

    @property
    def block_size(self) -> int | None:
        return self.number("block_size")

    @property
    def match_unit(self) -> int:
        """The tokens of --prefix-match-unit; 0 if the server has none: then hits are whole blocks."""
        return self.number("prefix_match_unit") or 0


OF_VLLM = (STARTED, CORE, CORE_SETTINGS, *(PREFIX + name for name in WANTED))


def wanted(text: str) -> list[str]:
    """Return the lines of the series of OF_VLLM."""
    if text.count("\n") > MOST_TEXT:
        raise BeyondError(f"it has more than {MOST_TEXT:,} lines")
    comments = tuple(f"# {kind} {name}" for kind in ("TYPE", "HELP") for name in OF_VLLM)
    return [
        line for line in text.split("\n") if line.startswith((*OF_VLLM, *comments)) and "_created" not in line
    ]


def _count(name: str, value: float) -> float:
    if not 0 <= value <= MOST:  # NaN is in no range
        raise WrongValue(f"{name} is {value}")
    return value


def _said(text: str) -> str:
    """Return a label's text as it may be shown anywhere: on one line, and short."""
    return one_line(text)[:LONGEST]


def read(text: str, time_s: float) -> Scrape:
    """Parse /metrics. UNREADABLE if the text is in another format, or has values that no server has."""
    with cpu_limit(READ_CPU_S):
        return scrape_of(decode_metrics(wanted(text)), time_s)


def scrape_of(samples: Iterable[tuple[str, Mapping[str, str], float]], time_s: float) -> Scrape:
    """Make a Scrape of series: names, labels, values. WrongValue for values that no server has."""
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    reasons: dict[str, float] = {}
    cache: dict[str, str] = {}
    engines: set[str] = set()
    model, started = "", None
    active, settings = False, None
    for series, labels, number in samples:
        if series == STARTED:
            started = max(started or 0.0, _count(STARTED, number))
        active = active or (series == CORE and number == 1)
        if series == CORE_SETTINGS and settings is None:
            settings = labels.get("settings", "")[:MOST_SETTINGS]
        if not series.startswith(PREFIX) or series.endswith("_created"):
            continue
        name, value = series.removeprefix(PREFIX), _count(series, number)
        model = model or _said(labels.get("model_name", ""))
        if engine := labels.get("engine"):
            engines.add(engine)
        if name == LABELS_OF_CACHE:
            cache = cache or {label: _said(text) for label, text in labels.items()}
        elif name.endswith("_bucket"):
            bounds = buckets.setdefault(name.removesuffix("_bucket"), {})
            if math.isnan(bound := float(labels["le"])):
                raise WrongValue("a bucket's bound is NaN")
            bounds[bound] = bounds.get(bound, 0.0) + value
        elif "reason" in labels and name.startswith("num_requests_waiting"):
            reason = _said(labels["reason"])
            reasons[reason] = reasons.get(reason, 0.0) + value
        else:
            key = name.removesuffix("_total")
            values[key] = values.get(key, 0.0) + value
    count = max(1, len(engines))
    if "kv_cache_usage_perc" in values:
        values["kv_cache_usage_perc"] /= count
    core = _settings(settings or "") if active else None
    return Scrape(time_s, values, buckets, reasons, cache, model, count, started, core)


def _settings(text: str) -> dict[str, Value]:
    """Return the core's settings from their JSON; none for any other text: the server may be of another kvtune."""
    try:
        return decode_json_as(text, dict[str, Value])
    except ValueError:
        return {}


@dataclass(frozen=True, slots=True)
class Between:
    """The differences between one scrape and a later one."""

    first: Scrape
    last: Scrape

    @property
    def seconds(self) -> float:
        return self.last.at - self.first.at

    def counted(self, name: str) -> float | None:
        before, after = self.first.get(name), self.last.get(name)
        return None if after is None else max(0.0, after - (before or 0.0))

    def rate(self, name: str) -> float | None:
        counted = self.counted(name)
        return counted / self.seconds if counted is not None and self.seconds > 0 else None

    def quantile(self, name: str, share: float) -> float | None:
        """Return a quantile of a histogram's counts between the scrapes, interpolated in its bucket; None if empty."""
        after, before = self.last.buckets.get(name), self.first.buckets.get(name, {})
        if not after:
            return None
        counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
        total = counts[-1][1]
        if total <= 0:
            return None
        low, below = 0.0, 0.0
        for bound, upto in counts:
            if upto >= share * total:
                if bound == float("inf"):
                    return low
                return low + (bound - low) * (share * total - below) / max(upto - below, 1e-9)
            low, below = bound, upto
        return low


def another_server(before: Scrape, after: Scrape) -> bool:
    """Whether the later answer is of a server that had started before the one that answered first."""
    return (
        before.started is not None and after.started is not None and after.started < before.started - CLOCK_S
    )


def begun_anew(before: Scrape, after: Scrape) -> bool:
    """Whether the server was restarted between two scrapes: its start is later, or a counter has fallen."""
    if before.started is not None and after.started is not None and after.started > before.started + 1:
        return True
    names: Sequence[str] = ("prompt_tokens", "generation_tokens", "prefix_cache_queries")
    return any((after.get(name) or 0.0) < (before.get(name) or 0.0) for name in names)


def same_life(before: Scrape, between: Scrape, after: Scrape) -> bool:
    """Whether what answered between two scrapes of a server was that server: its start, and its counters, say so."""
    if before.started is None or not before.started == between.started == after.started:
        return False
    names = (
        "prompt_tokens",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "request_success",
    )
    counts = [[scrape.get(name) or 0.0 for name in names] for scrape in (before, between, after)]
    return all(low <= middle <= high for low, middle, high in zip(*counts, strict=True))


SERVED = {
    "steps": "iteration_tokens_total_count",
    "step_tokens": "iteration_tokens_total_sum",
    "first_tokens": "time_to_first_token_seconds_count",
    "first_token_s": "time_to_first_token_seconds_sum",
    "gaps": "inter_token_latency_seconds_count",
    "gap_s": "inter_token_latency_seconds_sum",
    "answered": "request_decode_time_seconds_count",
    "queue_s": "request_queue_time_seconds_sum",
    "prefill_s": "request_prefill_time_seconds_sum",
    "decode_s": "request_decode_time_seconds_sum",
}
"""Columns of a recording's table `server`, and the series that they hold: of vLLM's histograms sum and count since the
server's start. Step costs are fitted to their differences (answers/explain/speed.py)."""


def served(scrape: Scrape) -> dict[str, float]:
    """Return the columns' values; 0 for a series that the server does not publish."""
    return {column: scrape.get(series) or 0.0 for column, series in SERVED.items()}
