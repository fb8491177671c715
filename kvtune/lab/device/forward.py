"""Reads what `vllm bench forward --output-json FILE` writes (vLLM 0.33), and fits a step's cost to it.

The file has a list of cases: the requests of one batch, and how long the model's forward takes. It names neither the
model nor the device, and sampling, the scheduler and the rest of a step's host time are not in its times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvtune.base.errors import UsageError, reason
from kvtune.base.files import read_json
from kvtune.base.statistics import fit_not_negative
from kvtune.lab.device.cost import StepCost

MOST_BYTES = 64 << 20
LEAST_CASES = 4
CLOCK = "forward"
SHOWN = "docs/capacity.md says what is read of `vllm bench forward --output-json FILE`"

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Micros = Annotated[float, msgspec.Meta(gt=0, le=1e12)]


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    query_len: _Tokens
    kv_len: _Tokens
    num_draft_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    chunked: bool = False

    @property
    def prefix(self) -> int:
        return self.kv_len - self.query_len

    @property
    def decodes(self) -> bool:
        return self.prefix > 0 and self.query_len == 1


class _Latency(msgspec.Struct, forbid_unknown_fields=True):
    timer: Literal["graph_events", "graph_events_rank_max", "pipeline_correlated_gpu_events_rank_max"]
    median: _Micros
    sample_spread_pct: Annotated[float, msgspec.Meta(ge=0)]
    mean: Any = None
    std: Any = None
    min: Any = None
    p90: Any = None
    count: Any = None
    samples_us: Any = None


class _Rank(msgspec.Struct, forbid_unknown_fields=True):
    """What one GPU found."""

    num_tokens: _Tokens
    latency_us: _Latency
    timing_scope: Literal["target_only", "target_and_drafter"]
    kv_blocks: Any = None
    routing: Any = None
    num_local_tokens: Any = None
    num_tokens_after_padding: Any = None
    batch_order: Any = None
    eager_repeat: Any = None
    graph_vs_eager: Any = None
    intermediate_graph_vs_eager: Any = None
    pipeline_vs_eager: Any = None
    pipeline_timeline: Any = None
    pipeline_warmup_microbatches: Any = None
    clock_uncertainty_us: Any = None
    graph_deterministic: Any = None
    finite: Any = None
    state_reset_bytes: Any = None
    drafter: Any = None
    profile: Any = None


class _Case(msgspec.Struct, forbid_unknown_fields=True):
    case: str
    requests: Annotated[list[_Request], msgspec.Meta(min_length=1)]
    median_us: _Micros
    ranks: Annotated[list[_Rank], msgspec.Meta(min_length=1)]


NEEDED = (
    ("a step", "two lengths of prompts, such as --case a=512 --case b=4096"),
    ("a prompt token", "a prompt, such as --case prefill=4096"),
    ("a decode", "two numbers of decodes, such as --case a=1*1@4096 --case b=32*1@4096"),
)
"""The columns of `_work` that are always fitted, and the cases that tell each; the others if the cases tell them."""


@dataclass(frozen=True, slots=True)
class Forward:
    """A cost fitted to a file's cases. `worst`: the case that it is furthest from, and by which share of its time."""

    cost: StepCost
    worst: tuple[str, float]
    spread: float
    """The largest spread of one case's samples, as a share of its median."""

    @property
    def said(self) -> str:
        cost, (name, off) = self.cost, self.worst
        return (
            f"{cost.steps} cases of `bench forward`, off by {cost.error_share:.1%} on average, at most {off:.1%} "
            f"(case {name}); a case that is left out of the fit by {cost.held_out_share:.1%}; samples of a case spread "
            f"by up to {self.spread:.1%}"
        )


def forward_cost(file: Path) -> Forward:
    """Return the cost fitted to a file. UsageError names the file, the case and the field."""
    cases = _read(file)
    work = np.array([_work(case.requests) for case in cases])
    times_us = np.array([case.median_us for case in cases])
    columns = _columns(file, work)
    weights = _fitted(work, times_us, columns)
    off = np.abs(work @ weights / times_us - 1)
    worst = int(off.argmax())
    cost = StepCost(
        step_us=float(weights[0]),
        prefill_token_us=float(weights[1]),
        decode_us=float(weights[2]),
        kv_token_us=float(weights[3]),
        prefill_kv_us=float(weights[4]),
        prefill_step_us=float(weights[5]),
        clock=CLOCK,
        source=str(file),
        steps=len(cases),
        mean_error_us=float((off * times_us).mean()),
        error_share=float(off.mean()),
        p90_error_us=float(np.percentile(off * times_us, 90)),
        held_out_share=_left_out(work, times_us, columns),
    )
    spread = max(case.ranks[0].latency_us.sample_spread_pct for case in cases) / 100
    return Forward(cost, (cases[worst].case, float(off[worst])), spread)


def _read(file: Path) -> list[_Case]:
    try:
        rows = read_json(file, MOST_BYTES)
    except OSError as error:
        raise UsageError(f"cannot read {file}: {reason(error)}", "check the path after forward=") from error
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {reason(error)}", SHOWN) from error
    if not isinstance(rows, list):
        raise UsageError(f"{file} is not a list of cases", SHOWN)
    return [_case(file, number, row) for number, row in enumerate(rows)]


def _case(file: Path, number: int, row: object) -> _Case:
    name = row.get("case") if isinstance(row, dict) else None
    where = f"{file}, case {number}" + (f" ({name!a:.60})" if isinstance(name, str) else "")
    try:
        case = msgspec.convert(row, _Case)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {reason(error)}", SHOWN) from error
    for nth, request in enumerate(case.requests):
        if request.kv_len < request.query_len:
            raise UsageError(
                f"{where}: requests[{nth}].kv_len={request.kv_len} is less than query_len={request.query_len}",
                "kv_len counts the request's own tokens, too",
            )
        if request.num_draft_tokens:
            raise UsageError(
                f"{where}: requests[{nth}].num_draft_tokens={request.num_draft_tokens}: cases with drafts are not read",
                "leave such cases out",
            )
    first = case.ranks[0]
    if first.timing_scope == "target_and_drafter":
        raise UsageError(
            f"{where}: ranks[0].timing_scope is target_and_drafter: the drafter's time is in it",
            "measure with --exclude-drafter",
        )
    if first.latency_us.timer.startswith("pipeline"):
        raise UsageError(
            f"{where}: ranks[0].latency_us.timer is {first.latency_us.timer}: a pipeline's stages overlap",
            "measure without --pipeline-parallel-size, or take --like RUN of `kvtune profile`",
        )
    tokens = sum(request.query_len for request in case.requests)
    if first.num_tokens != tokens:
        raise UsageError(
            f"{where}: ranks[0].num_tokens={first.num_tokens:,}, and the requests have {tokens:,}",
            "the file was changed: write it again",
        )
    if abs(first.latency_us.median / case.median_us - 1) > 1e-6:
        raise UsageError(
            f"{where}: median_us={case.median_us:.12g}, and ranks[0].latency_us.median={first.latency_us.median:.12g}",
            "the file was changed: write it again",
        )
    return case


def _work(requests: Sequence[_Request]) -> list[float]:
    """Return 1, prompt tokens, decodes, KV tokens of decodes, prompt x KV tokens, 1 if there is a prompt."""
    prompts = [request for request in requests if not request.decodes]
    decodes = [request for request in requests if request.decodes]
    attended = sum(prompt.query_len * (prompt.prefix + prompt.query_len / 2) for prompt in prompts)
    tokens = sum(prompt.query_len for prompt in prompts)
    return [1.0, tokens, len(decodes), sum(decode.prefix for decode in decodes), attended, bool(prompts)]


def _columns(file: Path, work: NDArray[np.float64]) -> list[int]:
    """Return the columns that the cases tell apart, fewer than cases."""
    if len(work) < LEAST_CASES:
        raise UsageError(
            f"{file} has {len(work)} cases, a step cost needs {LEAST_CASES}",
            "measure prompts of two lengths and two numbers of decodes: "
            "--case a=512 --case b=4096 --case c=1*1@4096 --case d=32*1@4096",
        )
    chosen: list[int] = []
    for column in range(work.shape[1]):
        if column >= len(NEEDED) and len(work) < len(chosen) + 2:
            break
        if _rank(work[:, [*chosen, column]]) > len(chosen):
            chosen.append(column)
        elif column < len(NEEDED):
            what, wanted = NEEDED[column]
            raise UsageError(
                f"{file}: its cases do not tell the time of {what} from the rest",
                f"add {wanted}",
            )
    return chosen


def _rank(work: NDArray[np.float64]) -> int:
    return int(np.linalg.matrix_rank(work / np.maximum(work.max(axis=0), 1e-12)))


def _fitted(
    work: NDArray[np.float64], times_us: NDArray[np.float64], columns: Sequence[int]
) -> NDArray[np.float64]:
    """Return a weight for each column, by least squares of relative errors."""
    used = work[:, columns]
    scale = np.maximum(used.max(axis=0), 1e-12)
    weights = np.zeros(work.shape[1])
    weights[columns] = fit_not_negative(used / scale / times_us[:, None], np.ones(len(times_us))) / scale
    return weights


def _left_out(work: NDArray[np.float64], times_us: NDArray[np.float64], columns: Sequence[int]) -> float:
    """Return the mean relative error of each case by a fit to the others."""
    rest = [np.arange(len(work)) != row for row in range(len(work))]
    off = [
        abs(float(work[number] @ _fitted(work[others], times_us[others], columns)) / times_us[number] - 1)
        for number, others in enumerate(rest)
    ]
    return float(np.mean(off))
