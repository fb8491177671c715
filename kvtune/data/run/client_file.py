"""Reads what load generators write of a run: `vllm bench serve --save-result`, AIPerf and GuideLLM. Files only.

Each names its figures in its own way; what they count is not always the same. Read is what kvtune has a figure for:

    here        vllm bench serve          AIPerf (profile_export_aiperf.json)   GuideLLM (benchmarks.json)
    ttft_ms     mean_ttft_ms ..           time_to_first_token                   time_to_first_token_ms
    tpot_ms     mean_tpot_ms ..           inter_token_latency, a mean a request inter_token_latency_ms: the same, but
                                                                                a request counts once for each gap
    itl_ms      mean_itl_ms ..: each gap  -                                     -
    e2e_ms      mean_e2el_ms .., if asked request_latency                       request_latency, in seconds
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from kvtune.base.errors import UsageError, reason
from kvtune.base.files import read_json

MOST_BYTES = 64 << 20
MOST_SIDES = 64
"""Benchmarks of one GuideLLM file: it has one for each rate."""
HINT = "docs/peers.md says which files are read: vllm bench serve, AIPerf, GuideLLM"

_Number = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds over all requests (`itl_ms`: over all gaps). None: the file does not have it."""

    mean: float | None = None
    p50: float | None = None
    p99: float | None = None


class ClientResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a load generator says of one run. None: the file does not have it.

    `hit_tokens`: of the prompts, by the server's answers. `possible_rate`: the share that an infinite cache would hit,
    as the file has it. `requests`: those that succeeded.
    """

    tool: str
    model: str = ""
    requests: int
    failed: int | None = None
    duration_s: float | None = None
    throughput_tok_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    hit_tokens: int | None = None
    possible_rate: float | None = None
    ttft_ms: Times = Times()
    tpot_ms: Times = Times()
    itl_ms: Times = Times()
    e2e_ms: Times = Times()

    @property
    def hit_rate(self) -> float | None:
        return (
            self.hit_tokens / self.prompt_tokens
            if self.hit_tokens is not None and self.prompt_tokens
            else None
        )


def is_client_file(path: Path) -> bool:
    """Whether a file is text that begins as JSON does; run files are archives."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip()[:1] == b"{"
    except OSError:
        return False


def read_client_file(path: Path) -> list[ClientResult]:
    """Return what a result file says, one for each of its benchmarks. UsageError names the file and the field."""
    try:
        value = read_json(path, MOST_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {reason(error)}", "check the path") from error
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {reason(error)}", HINT) from error
    try:
        results = list(_results(value))
    except (msgspec.ValidationError, _ShapeError) as error:
        raise UsageError(f"{path}: {reason(error)}", HINT) from error
    if not results:
        raise UsageError(f"{path} has no benchmark that ended", "give the file of a run that ended")
    return results


class _ShapeError(ValueError):
    """A file that is none of those that are read."""


def _results(value: Any) -> Iterator[ClientResult]:
    if not isinstance(value, dict):
        raise _ShapeError("it is no object")
    if "benchmarks" in value:
        yield from _guidellm(value)
    elif "time_to_first_token" in value or "request_latency" in value:
        yield _aiperf(value)
    elif "mean_ttft_ms" in value or "total_input_tokens" in value:
        yield _vllm(value)
    else:
        raise _ShapeError("it has neither the fields of vllm bench serve, nor AIPerf's, nor GuideLLM's")


class _Vllm(msgspec.Struct):
    completed: _Count
    duration: _Number
    total_input_tokens: _Count
    total_output_tokens: _Count
    model_id: str = ""
    failed: _Count | None = None
    output_throughput: _Number | None = None


def _vllm(value: Mapping[str, Any]) -> ClientResult:
    read = msgspec.convert(value, _Vllm)

    def times(field: str) -> Times:
        return Times(
            mean=_number(value, f"mean_{field}_ms"),
            p50=_number(value, f"median_{field}_ms"),
            p99=_number(value, f"p99_{field}_ms"),
        )

    return ClientResult(
        tool="vllm bench serve",
        model=read.model_id,
        requests=read.completed,
        failed=read.failed,
        duration_s=read.duration,
        throughput_tok_s=read.output_throughput,
        prompt_tokens=read.total_input_tokens,
        output_tokens=read.total_output_tokens,
        ttft_ms=times("ttft"),
        tpot_ms=times("tpot"),
        itl_ms=times("itl"),
        e2e_ms=times("e2el"),
    )


class _Metric(msgspec.Struct):
    """One of AIPerf's metrics. A figure of the whole run has `avg` alone."""

    unit: str
    avg: _Number | None = None
    p50: _Number | None = None
    p99: _Number | None = None


_MILLISECONDS = {"ms": 1.0, "sec": 1000.0, "s": 1000.0, "us": 1e-3, "ns": 1e-6}


def _aiperf(value: Mapping[str, Any]) -> ClientResult:
    def metric(name: str) -> _Metric | None:
        return msgspec.convert(value[name], _Metric) if value.get(name) is not None else None

    def times(name: str) -> Times:
        given = metric(name)
        if given is None:
            return Times()
        if given.unit not in _MILLISECONDS:
            raise _ShapeError(f"{name}.unit is {given.unit[:20]!a}, which is no unit of time")
        scale = _MILLISECONDS[given.unit]
        return Times(
            **{
                f: _scaled(getattr(given, a), scale)
                for f, a in (("mean", "avg"), ("p50", "p50"), ("p99", "p99"))
            }
        )

    def whole(*names: str) -> float | None:
        return next((given.avg for name in names if (given := metric(name)) is not None), None)

    requests = whole("request_count")
    if requests is None:
        raise _ShapeError("request_count is missing: no request succeeded")
    prompts, answers = (
        whole("total_usage_prompt_tokens", "total_isl"),
        whole("total_usage_completion_tokens", "total_osl"),
    )
    if prompts is None:
        prompts = _scaled(whole("input_sequence_length"), requests)
    cached, possible = whole("total_usage_prompt_cache_read_tokens"), whole("theoretical_prefix_cache_hit")
    return ClientResult(
        tool="AIPerf",
        model=_aiperf_model(value.get("input_config")),
        requests=round(requests),
        failed=_whole(whole("error_request_count")),
        duration_s=_seconds(metric("benchmark_duration")),
        throughput_tok_s=whole("output_token_throughput"),
        prompt_tokens=_whole(prompts),
        output_tokens=_whole(answers),
        hit_tokens=_whole(cached),
        possible_rate=_scaled(possible, 0.01),
        ttft_ms=times("time_to_first_token"),
        tpot_ms=times("inter_token_latency"),
        e2e_ms=times("request_latency"),
    )


def _aiperf_model(config: object) -> str:
    """Return the first model of a run's settings: `models.items[].name`, in earlier versions `endpoint.model_names`."""
    rows: object = None
    if isinstance(config, dict):
        for part, name in (("models", "items"), ("endpoint", "model_names")):
            inner = config.get(part)
            rows = rows or (inner.get(name) if isinstance(inner, dict) else None)
    first: object = rows[0] if isinstance(rows, list) and rows else ""
    model = first.get("name") if isinstance(first, dict) else first
    return model[:200] if isinstance(model, str) else ""


def _seconds(metric: _Metric | None) -> float | None:
    return None if metric is None else _scaled(metric.avg, _MILLISECONDS.get(metric.unit, 1000.0) / 1000.0)


class _Percentiles(msgspec.Struct):
    p50: _Number | None = None
    p99: _Number | None = None


class _Spread(msgspec.Struct):
    mean: _Number | None = None
    median: _Number | None = None
    count: _Count | None = None
    total_sum: _Number | None = None
    percentiles: _Percentiles | None = None


class _ByStatus(msgspec.Struct):
    successful: _Spread | None = None


class _GuidellmMetrics(msgspec.Struct):
    request_latency: _ByStatus
    time_to_first_token_ms: _ByStatus | None = None
    inter_token_latency_ms: _ByStatus | None = None
    prompt_token_count: _ByStatus | None = None
    output_token_count: _ByStatus | None = None
    output_tokens_per_second: _ByStatus | None = None


class _GuidellmBenchmark(msgspec.Struct):
    metrics: _GuidellmMetrics
    duration: _Number | None = None
    requests: Any = None


def _guidellm(value: Mapping[str, Any]) -> Iterator[ClientResult]:
    benchmarks = value["benchmarks"]
    if not isinstance(benchmarks, list) or len(benchmarks) > MOST_SIDES:
        raise _ShapeError(f"benchmarks is no list of at most {MOST_SIDES} benchmarks")
    for row in benchmarks:
        read = msgspec.convert(row, _GuidellmBenchmark)
        metrics, latency = read.metrics, read.metrics.request_latency.successful
        if latency is None or not latency.count:
            continue
        succeeded, failed, cached = _guidellm_requests(read.requests)
        yield ClientResult(
            tool="GuideLLM",
            requests=latency.count,
            failed=failed,
            duration_s=read.duration,
            throughput_tok_s=_mean(metrics.output_tokens_per_second),
            prompt_tokens=_sum(metrics.prompt_token_count),
            output_tokens=_sum(metrics.output_token_count),
            hit_tokens=cached if succeeded == latency.count else None,
            ttft_ms=_spread(metrics.time_to_first_token_ms),
            tpot_ms=_spread(metrics.inter_token_latency_ms),
            e2e_ms=_spread(metrics.request_latency, 1000.0),
        )


def _guidellm_requests(requests: object) -> tuple[int, int | None, int | None]:
    """Return how many requests the file has, how many failed, and the cached tokens if each request has them."""
    if not isinstance(requests, dict):
        return 0, None, None
    rows, errors = requests.get("successful"), requests.get("errored")
    rows = rows if isinstance(rows, list) else []
    tokens = [row.get("cached_tokens") if isinstance(row, dict) else None for row in rows]
    counts = [
        count for count in tokens if isinstance(count, int) and not isinstance(count, bool) and count >= 0
    ]
    cached = sum(counts) if rows and len(counts) == len(rows) else None
    return len(rows), len(errors) if isinstance(errors, list) else None, cached


def _spread(statuses: _ByStatus | None, scale: float = 1.0) -> Times:
    spread = statuses.successful if statuses is not None else None
    if spread is None:
        return Times()
    percentiles = spread.percentiles or _Percentiles()
    middle = percentiles.p50 if spread.median is None else spread.median
    return Times(
        mean=_scaled(spread.mean, scale), p50=_scaled(middle, scale), p99=_scaled(percentiles.p99, scale)
    )


def _mean(statuses: _ByStatus | None) -> float | None:
    return statuses.successful.mean if statuses is not None and statuses.successful is not None else None


def _sum(statuses: _ByStatus | None) -> int | None:
    return (
        _whole(statuses.successful.total_sum)
        if statuses is not None and statuses.successful is not None
        else None
    )


def _number(value: Mapping[str, Any], name: str) -> float | None:
    if value.get(name) is None:
        return None
    try:
        return msgspec.convert(value[name], _Number)
    except msgspec.ValidationError as error:
        raise _ShapeError(f"{name}: {reason(error)}") from error


def _scaled(value: float | None, scale: float) -> float | None:
    return value * scale if value is not None and math.isfinite(value) else None


def _whole(value: float | None) -> int | None:
    return round(value) if value is not None and math.isfinite(value) else None
