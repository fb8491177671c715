"""Two runs side by side: whether they are comparable, and which figures differ by more than chance. Pure; seeded.

Intervals are 95 % bootstrap intervals over the requests of the two runs; for counts of events, Poisson intervals. They
cover the spread within these runs, not between runs: a machine that was slower during one whole run would show as a
difference. So measured times are judged only over repeated runs (`repeated`); predicted times are judged here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvtune.base.statistics import bootstrap, share_interval
from kvtune.base.units import count, size
from kvtune.data.flags import settings_given
from kvtune.data.run.extras import GpuFacts
from kvtune.data.run.types import Run, untimed
from kvtune.reading.analysis.comparison.measures import MEASURES, Columns, Measure, Statistic
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.spread import CONFIDENCE, mean_difference
from kvtune.reading.analysis.summary import Summary, summary

Judgement = Literal["better", "worse", "no difference shown", "not judged"]
"""Verdicts on a side compared with the first side, in `compare`, `tune` and recipes."""

NOT_JUDGED: Judgement = "not judged"
ONE_RUN = "one run a side: not judged"
"""The reason why a measured time gets no verdict: the machine's drift between two runs can be as large."""

OTHER_TRAFFIC = "recordings of other traffic"
"""The reason why a figure of two recordings gets no verdict: what was asked may differ as much as the server."""

POOL_FLAGS = frozenset({"num-gpu-blocks-override", "kv-cache-memory-bytes", "gpu-memory-utilization"})
POOL_SHARE = 0.01
"""Measured pools whose sizes differ by more than this share are reported."""

OF_THE_CLIENT = ("workload", "python")
"""Checked fields that recordings of a server may differ in: its traffic is never the same, and is told beside it."""

BATCH = ("max_num_batched_tokens", "max_num_seqs")

RESAMPLES = 1000
Z = 1.96  # standard deviations on either side that hold 95 % of a normal distribution


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A checked field that differs between the runs."""

    field: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Figure:
    """`difference` is b - a, between `low` and `high` with 95 % confidence; `relative` is difference / a.

    Without an interval the figure is not judged, and `why` says what is missing.
    """

    path: str
    a: float | None
    b: float | None
    difference: float | None
    relative: float | None
    low: float | None
    high: float | None
    verdict: Judgement
    why: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    mismatches: tuple[Mismatch, ...]
    figures: tuple[Figure, ...]


def mismatches(a: Run, b: Run) -> tuple[Mismatch, ...]:
    """Return the checked fields that differ.

    The core and the engine's flags are not checked, as runs are made to compare them; defaults without a flag are
    checked.
    """
    recordings = a.header.source == b.header.source == "server"
    pairs = zip(_checked(a).items(), _checked(b).values(), strict=True)
    differing = [
        Mismatch(field, left, right)
        for (field, left), right in pairs
        if left != right and not (recordings and field in OF_THE_CLIENT)
    ]
    states = _states(a), _states(b)
    if all(states) and states[0].split()[0] != states[1].split()[0]:
        differing.append(Mismatch("recurrent states", *states))
    differing += _defaults(a, b)
    differing += _machines(a, b)
    differing += _pools(a, b)
    if not recordings and "partial" in (a.header.state, b.header.state) and _sent(a) != _sent(b):
        differing.append(Mismatch("requests sent", _sent(a), _sent(b)))
    return tuple(differing)


def compare(a: Run, b: Run, *, seed: int = 0, summaries: tuple[Summary, Summary] | None = None) -> Comparison:
    """Compare every figure of the two runs, also of mismatched ones. `why` marks a figure that only one run has.

    `summaries`: the two runs' summaries, if they were computed already; with or without the workload.
    """
    left, right = summaries or (summary(RunAnalysis(a)), summary(RunAnalysis(b)))
    figures = []
    for m in MEASURES:
        first, two = value_at(left, m.path), value_at(right, m.path)
        if first is not None or two is not None:
            figures.append(_judged(m, first, two, _interval(m, a, b, first, two, seed)))
    return Comparison(mismatches(a, b), tuple(figures))


def value_at(fields: Mapping[str, object], path: str) -> float | None:
    """Return the number at a dotted path (`rounds.1.hit_tokens`), None if it is no number. KeyError: no such field."""
    value: object = fields
    for name in path.split("."):
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        elif value is None or (isinstance(value, Mapping) and path.startswith(("gc.", "memory."))):
            return None  # a process that this run does not have
        else:
            raise KeyError(path)
    return float(value) if isinstance(value, (bool, int, float)) else None


def _checked(run: Run) -> dict[str, str]:
    h = run.header
    return {
        "source": h.source,
        "model": h.model,
        "workload": h.workload.hash,
        "vllm": h.engine.vllm,
        "device": " ".join(filter(None, (h.engine.device, h.engine.device_name))),
        "python": h.python,
    }


def _defaults(a: Run, b: Run) -> Iterator[Mismatch]:
    """Yield batch limits that differ although no flag set them: vLLM's defaults depend on the device and the caller."""
    given = settings_given(a.header.engine.args) | settings_given(b.header.engine.args)
    for name in BATCH:
        values = [run.header.engine.settings.get(name) for run in (a, b)]
        if name.replace("_", "-") not in given and all(values) and values[0] != values[1]:
            yield Mismatch(
                name, *(f"{value} ({_origin(run, name)})" for run, value in zip((a, b), values, strict=True))
            )


def _machines(a: Run, b: Run) -> Iterator[Mismatch]:
    """Yield properties, besides the GPU's name, that affect its times and differ, if both runs recorded them."""
    pairs = zip(_machine(a).items(), _machine(b).values(), strict=True)
    yield from (
        Mismatch(field, left, right) for (field, left), right in pairs if left and right and left != right
    )


def _machine(run: Run) -> dict[str, str]:
    h = run.header
    gpu = h.extra.gpus[0] if h.extra.gpus else GpuFacts()
    return {
        "driver": gpu.driver,
        "GPU memory": size(gpu.memory_bytes) if gpu.memory_bytes else "",
        "power limit": f"{gpu.power_limit_w:.0f} W" if gpu.power_limit_w else "",
        "model runner": str(h.engine.settings.get("model_runner") or ""),
        "torch": h.engine.torch,
    }


def _pools(a: Run, b: Run) -> Iterator[Mismatch]:
    """Yield a mismatch if vLLM sized both pools by free memory, and pools with equal page sizes differ in blocks."""
    pools = [_measured_blocks(run) for run in (a, b)]
    if all(pools) and _pages(a) == _pages(b) and abs(pools[1] - pools[0]) > POOL_SHARE * pools[0]:
        yield Mismatch("KV cache", *(f"{count(blocks)} blocks (measured by vLLM)" for blocks in pools))


def _measured_blocks(run: Run) -> int:
    """Return the number of blocks of a pool that vLLM sized itself; 0 if flags set the size, or the run had no GPU."""
    engine = run.header.engine
    given = settings_given(engine.args) & POOL_FLAGS
    return 0 if given or engine.device != "cuda" or run.header.source != "engine" else engine.num_blocks


def _pages(run: Run) -> list[object]:
    return [(group.get("page_bytes"), group.get("layers")) for group in run.header.engine.groups]


def _origin(run: Run, name: str) -> str:
    return run.header.engine.origins.get(name) or "vLLM's default without its server, by an older kvtune"


def _sent(run: Run) -> str:
    sent = np.isfinite(run.table("requests")["sent_s"])
    return f"{int(sent.sum())} of {len(sent)}"


def _states(run: Run) -> str:
    """Return the type of recurrent states, and the CPU feature that decided it; "" if a flag set it, or if unknown."""
    h = run.header
    if settings_given(h.engine.args) & {"mamba-ssm-cache-dtype", "dtype"}:
        return ""
    dtype, has_bf16 = h.engine.state_dtype, h.host.avx512_bf16
    if not dtype or has_bf16 is None or h.engine.device != "cpu":
        return dtype
    return f"{dtype} (CPU {'with' if has_bf16 else 'without'} AVX-512 BF16)"


Interval = tuple[float, float]


def _judged(m: Measure, a: float | None, b: float | None, interval: Interval | str) -> Figure:
    """Return the figure: better or worse only if `interval` excludes zero. A text says why there is none."""
    difference = b - a if a is not None and b is not None else None
    relative = difference / abs(a) if difference is not None and a else None
    if isinstance(interval, str):
        return Figure(m.path, a, b, difference, relative, None, None, NOT_JUDGED, interval)
    verdict: Judgement = "no difference shown"
    low, high = interval
    if low > 0 or high < 0:
        verdict = "better" if (low > 0) == (m.better > 0) else "worse"
    return Figure(m.path, a, b, difference, relative, low, high, verdict)


def _interval(
    m: Measure, a: Run, b: Run, left_value: float | None, right_value: float | None, seed: int
) -> Interval | str:
    """Return the interval of b - a, or the reason why there is none."""
    if left_value is None or right_value is None:
        return f"only the {'second' if left_value is None else 'first'} run has it"
    if other_traffic(a, b):
        return OTHER_TRAFFIC
    if m.timed and (why := distorted(a) or distorted(b)):
        return why
    if m.timed and not predicted(a, b):
        return ONE_RUN
    if m.events:
        return _of_events(left_value, right_value)
    if m.observe is None or m.statistic is None:
        return "one value a run: repeat the runs to learn its spread"
    left, right = m.observe(a), m.observe(b)
    paired = m.paired and a.header.workload.hash == b.header.workload.hash and len(left[0]) == len(right[0])
    if paired:
        both = _observed((*left, *right))
        left, right = _rows(left, both), _rows(right, both)
    else:
        left, right = _rows(left, _observed(left)), _rows(right, _observed(right))
    fewest = min(len(left[0]), len(right[0]))
    if fewest < m.fewest:
        return f"{fewest} observations are too few: it takes {m.fewest}"
    return _bootstrap(left, right, m.statistic, paired, seed)


def _of_events(left: float, right: float) -> Interval:
    """Return the interval of the difference of two counts, from that of their ratio, so that no count is negative."""
    if not left:
        half = Z * (right + 1) ** 0.5
        return max(0.0, right - half), right + half
    shares = share_interval(round(right), round(left + right), CONFIDENCE)
    low, high = (left * (p / (1 - p) - 1) for p in shares)
    return low, high


def predicted(*runs: Run) -> bool:
    """Whether all times come from a simulator, and so are the same at every repetition."""
    return all(run.header.source == "sim" for run in runs)


def other_traffic(a: Run, b: Run) -> bool:
    """Whether these are recordings of a server of which no log says that they had the same requests."""
    recordings = a.header.source == b.header.source == "server"
    return recordings and not (a.header.workload.hash and a.header.workload.hash == b.header.workload.hash)


def distorted(run: Run) -> str:
    """Return the reason why a run's times must not be compared; "" if they may. Predicted times may be compared."""
    if why := untimed(run.header):
        return f"there are no times: {why}"
    if run.header.source == "sim" or run.header.valid.timings:
        return ""
    return f"times are distorted: {run.header.valid.why}"


def _observed(columns: Columns) -> NDArray[np.bool_]:
    return np.asarray(np.logical_and.reduce([np.isfinite(column) for column in columns]), dtype=np.bool_)


def _rows(columns: Columns, kept: NDArray[np.bool_]) -> Columns:
    return tuple(column[kept] for column in columns)


def _bootstrap(a: Columns, b: Columns, statistic: Statistic, paired: bool, seed: int) -> Interval:
    rows_a, rows_b = np.arange(len(a[0])), np.arange(len(b[0]))

    # Row numbers are resampled, so that the columns of a row stay together.
    def of_pairs(rows: NDArray[np.int64], axis: int = -1) -> NDArray[np.float64]:
        return of_both(rows, rows, axis)

    def of_both(left: NDArray[np.int64], right: NDArray[np.int64], axis: int = -1) -> NDArray[np.float64]:
        first, two = (
            statistic(*(column[rows] for column in side), axis=axis) for side, rows in ((a, left), (b, right))
        )
        return np.asarray(two - first, dtype=np.float64)

    return bootstrap(
        (rows_a,) if paired else (rows_a, rows_b),
        of_pairs if paired else of_both,
        resamples=RESAMPLES,
        batch=max(1, 2_000_000 // max(len(rows_a), len(rows_b))),
        confidence=CONFIDENCE,
        seed=seed,
    )


def average(summaries: Sequence[Any]) -> Any:
    """Return the mean of each number in summaries of the same shape; None where one summary has no number."""
    first = summaries[0]
    if isinstance(first, Mapping):
        return {key: average([s[key] for s in summaries if key in s]) for key in first}
    if isinstance(first, list):
        fewest = min(len(s) for s in summaries)
        return [average([s[i] for s in summaries]) for i in range(fewest)]
    if isinstance(first, bool) or not isinstance(first, (int, float)):
        return first
    numbers = [s for s in summaries if isinstance(s, (int, float))]
    return sum(numbers) / len(numbers) if len(numbers) == len(summaries) else None


FEWEST = 2
"""Fewest runs of each setting; with fewer the spread is unknown. Few runs give wide intervals."""


def compare_repeats(
    a: Sequence[Run], b: Sequence[Run], summaries: tuple[Sequence[Summary], Sequence[Summary]] | None = None
) -> Comparison:
    """Compare two sides with several runs each. All runs are checked against the first run of `a`."""
    differing: dict[str, Mismatch] = {}
    for run in (*a[1:], *b):
        for mismatch in mismatches(a[0], run):
            differing.setdefault(mismatch.field, mismatch)
    left, right = summaries or ([summary(RunAnalysis(run)) for run in side] for side in (a, b))
    why = next(filter(None, map(distorted, (*a, *b))), "")
    traffic = OTHER_TRAFFIC if any(other_traffic(a[0], run) for run in (*a[1:], *b)) else ""
    figures = []
    for m in MEASURES:
        values = ([value_at(s, m.path) for s in side] for side in (left, right))
        first, two = ([value for value in side if value is not None] for side in values)
        if first or two:
            figures.append(repeated(m, first, two, traffic or (why if m.timed else "")))
    return Comparison(tuple(differing.values()), tuple(figures))


def repeated(m: Measure, a: Sequence[float], b: Sequence[float], why: str = "") -> Figure:
    """Return the figure with its verdict, from one value per run. `why`: the reason if these values are not judged."""
    mean = float(np.mean(a)) if a else None
    two = float(np.mean(b)) if b else None
    fewest = min(len(a), len(b))
    if fewest < FEWEST:
        why = why or (ONE_RUN if fewest == 1 else "no run of a side has it")
    return _judged(m, mean, two, why or mean_difference(a, b))
