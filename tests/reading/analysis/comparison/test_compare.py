from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from scipy import stats

from kvtune.data.run.extras import Extras, GpuFacts
from kvtune.data.run.types import CoreInfo, EngineInfo, HostInfo, Run, Validity
from kvtune.reading.analysis.comparison.compare import (
    Comparison,
    Figure,
    compare,
    compare_repeats,
    mismatches,
    value_at,
)
from kvtune.reading.analysis.comparison.measures import is_timed
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from kvtune.requests.types import Span
from tests.reading.analysis.made import header_of, served, table, workload_of

FITTED = Extras(step_cost={"fitted": True})
COUNT = 200
WORKLOAD = workload_of([(Span(i % 10, 0, 100),) for i in range(COUNT)])


def run(ttft_s: np.ndarray[Any, Any], hit: int = 48, **fields: Any) -> Run:
    """Predicted, unless `source` says otherwise: times of one measured run a side are not judged."""
    fields = {"source": "sim", "extra": FITTED, **fields}
    sent = np.arange(COUNT, dtype=float)
    tables = {
        "tokens": table(
            "tokens",
            request=np.repeat(np.arange(COUNT), 2).tolist(),
            t_s=np.ravel(np.column_stack((sent + ttft_s, sent + ttft_s + 0.01))).tolist(),
            count=[1] * (2 * COUNT),
        ),
        "steps": table(
            "steps",
            process=[1] * 400,
            t_s=list(range(400)),
            schedule_us=(100 + np.random.default_rng(5).normal(0, 5, 400)).tolist(),
            update_us=[50.0] * 400,
            step_us=[1000.0] * 400,
            requests=[10] * 400,
        ),
    }
    return served(
        WORKLOAD,
        [0] * 10 + [hit] * (COUNT - 10),
        sent=sent.tolist(),
        first=(sent + ttft_s).tolist(),
        tables=tables,
        **fields,
    )


def noise(seed: int) -> np.ndarray[Any, Any]:
    return 0.5 + np.random.default_rng(seed).normal(0, 0.05, COUNT)


def figures(comparison: Comparison) -> dict[str, Figure]:
    return {figure.path: figure for figure in comparison.figures}


def test_a_real_difference_is_shown_with_its_interval() -> None:
    by_path = figures(compare(run(noise(1)), run(noise(2) * 0.9)))["ttft_ms.mean"]
    assert by_path.verdict == "better"
    assert by_path.low is not None
    assert by_path.high is not None
    assert by_path.low < by_path.difference < by_path.high < 0  # type: ignore[operator]
    assert by_path.relative == pytest.approx(-0.1, abs=0.02)
    back = figures(compare(run(noise(2) * 0.9), run(noise(1))))["ttft_ms.mean"]
    assert back.verdict == "worse"


def test_the_interval_agrees_with_normal_theory() -> None:
    a, b = noise(1), noise(2)
    by_path = figures(compare(run(a), run(b)))["ttft_ms.mean"]
    half = 1.96 * (b - a).std(ddof=1) / COUNT**0.5 * 1000
    assert by_path.low == pytest.approx((b - a).mean() * 1000 - half, abs=half * 0.15)
    assert by_path.high == pytest.approx((b - a).mean() * 1000 + half, abs=half * 0.15)


@pytest.mark.full
def test_noise_is_rarely_called_a_difference() -> None:
    """Of 40 comparisons without a difference about 2 may be called one at 95 %; 9 would be 5 in a million."""
    shown = 0
    for seed in range(40):
        by_path = figures(compare(run(noise(2 * seed)), run(noise(2 * seed + 1)), seed=seed))
        shown += by_path["ttft_ms.mean"].verdict != "no difference shown"
    assert shown < 9


def test_pairing_finds_what_differs_request_by_request() -> None:
    wide = np.random.default_rng(0).uniform(0.1, 5.0, COUNT)
    by_path = figures(compare(run(wide), run(wide * 0.99)))["ttft_ms.mean"]
    assert by_path.verdict == "better"


def test_hits_are_better_when_there_are_more() -> None:
    by_path = figures(compare(run(noise(1), hit=48), run(noise(1), hit=64)))
    rate = by_path["prefix_cache.hit_rate"]
    assert rate.verdict == "better"
    assert rate.difference == pytest.approx(190 * 16 / 20_000)
    assert by_path["ttft_ms.mean"].verdict == "no difference shown"
    assert by_path["ttft_ms.mean"].low == by_path["ttft_ms.mean"].high == 0.0


def test_a_figure_with_one_number_a_run_gets_no_verdict() -> None:
    slow = figures(compare(run(noise(1), wall_s=10.0), run(noise(1), wall_s=20.0)))["throughput_tok_s"]
    assert slow.relative == pytest.approx(-0.5)
    assert slow.verdict == "not judged"
    assert "repeat" in slow.why


def test_measured_times_of_one_run_a_side_are_not_judged_but_counts_are() -> None:
    def measured(speed: float, hit: int, collections: int) -> Run:
        gc = table("gc", process=[1] * collections, t_s=np.linspace(0, 9, collections).tolist())
        made = run(noise(1) * speed, hit=hit, source="engine")
        return Run(made.header, {**made.tables, "gc": gc})

    by_path = figures(compare(measured(1.0, 48, 40), measured(2.137, 64, 10)))
    timed = {path: f for path, f in by_path.items() if is_timed(path)}
    assert {f.verdict for f in timed.values()} == {"not judged"} and len(timed) > 8
    assert timed["ttft_ms.mean"].why == "one run a side: not judged" and timed["ttft_ms.mean"].low is None
    assert timed["ttft_ms.mean"].relative == pytest.approx(1.137, abs=0.01)
    assert by_path["prefix_cache.hit_rate"].verdict == "better"
    assert by_path["gc.engine_core.collections_total"].verdict == "better"
    few = figures(compare(measured(1.0, 48, 12), measured(1.0, 48, 10)))["gc.engine_core.collections_total"]
    assert few.verdict == "no difference shown"
    assert few.low is not None and few.high is not None and -12 < few.low < -2 < 0 < few.high


@pytest.mark.parametrize(
    ("left", "right"), [(13, 4), (1, 0), (40, 10), (3, 0), (0, 9), (0, 0), (0, 2), (5, 5)]
)
def test_a_count_of_events_cannot_fall_by_more_than_all_of_them(left: int, right: int) -> None:
    def collected(count: int) -> Run:
        made = run(noise(1), source="engine")
        return Run(made.header, {**made.tables, "gc": table("gc", process=[1] * count, t_s=[0.1] * count)})

    figure = figures(compare(collected(left), collected(right)))["gc.engine_core.collections_total"]
    assert figure.low is not None and figure.high is not None
    assert -left <= figure.low <= right - left <= figure.high
    assert (figure.verdict == "better") == (left - right >= 9)
    assert (figure.verdict == "worse") == (right == 9)


def test_a_partial_run_did_other_work_than_a_whole_one() -> None:
    whole = run(noise(1))
    sent = np.where(np.arange(COUNT) < 44, whole.table("requests")["sent_s"], np.nan)
    cut = Run(
        replace(whole.header, state="partial"),
        {**whole.tables, "requests": {**whole.table("requests"), "sent_s": sent}},
    )
    (differing,) = mismatches(whole, cut)
    assert (differing.field, differing.a, differing.b) == ("requests sent", "200 of 200", "44 of 200")
    assert mismatches(cut, cut) == ()


def test_every_figure_equals_the_summarys() -> None:
    a, b = run(noise(1)), run(noise(2))
    comparison = compare(a, b)
    assert len(comparison.figures) >= 8
    for figure in comparison.figures:
        assert figure.a == value_at(summary(RunAnalysis(a)), figure.path)
        assert figure.b == value_at(summary(RunAnalysis(b)), figure.path)
        if figure.low is not None:  # the statistic that is resampled is the figure itself
            assert figure.low <= figure.difference <= figure.high  # type: ignore[operator]
    assert json.dumps(msgspec.to_builtins(comparison), allow_nan=False)


def test_a_comparison_is_reproducible() -> None:
    a, b = run(noise(1)), run(noise(2))
    assert compare(a, b) == compare(a, b)


def test_distorted_times_get_no_verdict_but_hits_do() -> None:
    bad = run(noise(1) * 2, hit=64, source="engine", valid=Validity(timings=False, why="tracemalloc"))
    by_path = figures(compare(run(noise(1), source="engine"), bad))
    assert by_path["ttft_ms.mean"].verdict == "not judged"
    assert "tracemalloc" in by_path["ttft_ms.mean"].why
    assert by_path["prefix_cache.hit_rate"].verdict == "better"


def test_few_requests_and_empty_runs_get_no_interval() -> None:
    few = workload_of([(Span(0, 0, 10),)] * 3)
    by_path = figures(
        compare(
            served(few, [0] * 3, source="sim", extra=FITTED), served(few, [0] * 3, source="sim", extra=FITTED)
        )
    )
    assert by_path["ttft_ms.mean"].why == "3 observations are too few: it takes 8"
    nothing = Run(header_of(wall_s=0.0, processes=[]))
    assert compare(nothing, nothing).figures == ()
    one_sided = figures(compare(run(noise(1)), Run(header_of(wall_s=0.0))))
    assert one_sided["ttft_ms.mean"].verdict == "not judged"
    assert "first" in one_sided["ttft_ms.mean"].why


def test_checked_fields_that_differ_are_mismatches() -> None:
    same = run(noise(1))
    assert mismatches(same, run(noise(1), core=CoreInfo(name="kvtune", active=True))) == ()
    other = run(
        noise(1),
        model="tiny-gemma3",
        python="3.12.1",
        source="engine",
        engine=EngineInfo(vllm="0.33.0", device="cuda", block_size=32),
    )
    assert [m.field for m in mismatches(same, other)] == ["source", "model", "vllm", "device", "python"]
    from_other = served(workload_of([]), [], source="sim"), same
    assert mismatches(*from_other) == ()


def states(dtype: str, has: bool | None, args: list[str] | None = None) -> Run:
    """A run of a hybrid model on a CPU with or without AVX-512 BF16, or from before it was recorded (None)."""
    fields = {"dtypes": {"$tuple": [{"$dtype": "bfloat16"}, {"$dtype": dtype}]}}
    engine = EngineInfo(
        vllm="0.32.0",
        device="cpu",
        args=args or [],
        kv_specs={"specs": [{"fields": fields}] if dtype else []},
    )
    return run(noise(1), engine=engine, host=HostInfo(avx512_bf16=has))


def test_states_of_another_data_type_are_a_mismatch() -> None:
    (differing,) = mismatches(states("float32", True), states("bfloat16", None))
    assert (differing.field, differing.a, differing.b) == (
        "recurrent states",
        "float32 (CPU with AVX-512 BF16)",
        "bfloat16",
    )
    assert mismatches(states("float32", True), states("float32", False)) == ()
    # Chosen by a person, or not known: what is compared, or nothing to say.
    asked = states("bfloat16", True, ["--mamba-ssm-cache-dtype", "bfloat16"])
    assert mismatches(states("float32", True), asked) == ()
    assert mismatches(states("float32", True), states("", False)) == ()


def test_requests_are_paired_only_where_they_are_the_same() -> None:
    """Pairing requests of different workloads would narrow the interval without a reason."""
    wide = np.random.default_rng(0).uniform(0.1, 5.0, COUNT)
    other = replace(run(wide * 0.99).header, workload=replace(run(wide).header.workload, hash="other"))
    by_path = figures(compare(run(wide), Run(other, run(wide * 0.99).tables)))["ttft_ms.mean"]
    assert by_path.verdict == "no difference shown"
    assert by_path.low is not None


def test_a_99th_percentile_takes_many_requests() -> None:
    few = workload_of([(Span(0, 0, 10),)] * 50)
    by_path = figures(
        compare(
            served(few, [0] * 50, source="sim", extra=FITTED),
            served(few, [0] * 50, source="sim", extra=FITTED),
        )
    )
    assert by_path["ttft_ms.p99"].low is None
    assert by_path["ttft_ms.p50"].low == 0.0
    assert figures(compare(run(noise(1)), run(noise(2))))["ttft_ms.p99"].low is not None


def test_repeats_give_every_figure_an_interval() -> None:
    a = [run(noise(i), wall_s=10.0 + 0.1 * i) for i in range(4)]
    b = [run(noise(9 + i), wall_s=12.0 + 0.1 * i) for i in range(4)]
    by_path = figures(compare_repeats(a, b))
    tok_s = by_path["throughput_tok_s"]
    assert tok_s.verdict == "worse"
    ours, theirs = ([800 / s for s in side] for side in ((10.0, 10.1, 10.2, 10.3), (12.0, 12.1, 12.2, 12.3)))
    assert (tok_s.a, tok_s.b) == (pytest.approx(np.mean(ours)), pytest.approx(np.mean(theirs)))
    # Welch's interval, by hand.
    parts = [np.var(side, ddof=1) / 4 for side in (ours, theirs)]
    freedom = sum(parts) ** 2 / sum(part**2 / 3 for part in parts)
    half = stats.t.ppf(0.975, freedom) * sum(parts) ** 0.5
    assert tok_s.low == pytest.approx(np.mean(theirs) - np.mean(ours) - half)
    assert tok_s.high == pytest.approx(np.mean(theirs) - np.mean(ours) + half)
    assert by_path["prefix_cache.hit_rate"].low == by_path["prefix_cache.hit_rate"].high == 0.0


def test_a_drifting_machine_is_no_difference() -> None:
    """In one pair of runs 10 % look certain; over runs that drift by 20 % no difference is shown."""
    assert figures(compare(run(noise(1)), run(noise(2) * 1.1)))["ttft_ms.mean"].verdict == "worse"
    a = [run(noise(i) * drift) for i, drift in enumerate((1.0, 1.2, 0.9))]
    b = [run(noise(i + 5) * 1.1 * drift) for i, drift in enumerate((1.1, 0.85, 1.15))]
    assert figures(compare_repeats(a, b))["ttft_ms.mean"].verdict == "no difference shown"


def test_too_few_repeats_and_mismatches() -> None:
    one = compare_repeats([run(noise(1))], [run(noise(2)), run(noise(3), model="other")])
    assert {f.verdict for f in one.figures} == {"not judged"}
    assert figures(one)["ttft_ms.mean"].why == "one run a side: not judged"
    assert [m.field for m in one.mismatches] == ["model"]


OLDER = EngineInfo(settings={"max_num_batched_tokens": 2048, "max_num_seqs": 128})
SERVED = EngineInfo(
    settings={"max_num_batched_tokens": 8192, "max_num_seqs": 1024},
    origins=dict.fromkeys(("max_num_batched_tokens", "max_num_seqs"), "vLLM's default for NVIDIA H100"),
)


def test_chunk_and_seats_that_no_flag_gave_are_named_where_they_differ() -> None:
    older, served_now = run(noise(1), engine=OLDER), run(noise(2), engine=SERVED)
    chunk, seats = mismatches(older, served_now)
    assert (chunk.field, seats.field) == ("max_num_batched_tokens", "max_num_seqs")
    assert chunk.a == "2048 (vLLM's default without its server, by an older kvtune)"
    assert seats.b == "1024 (vLLM's default for NVIDIA H100)"
    assert not mismatches(older, older) and not mismatches(served_now, served_now)


def test_a_chunk_that_a_flag_gave_is_what_the_runs_were_made_to_compare() -> None:
    flagged = replace(SERVED, args=["--max-num-batched-tokens", "8192"])
    assert [m.field for m in mismatches(run(noise(1), engine=OLDER), run(noise(2), engine=flagged))] == [
        "max_num_seqs"
    ]


def on_gpu(driver: str = "580.65", blocks: int = 10_000, args: tuple[str, ...] = ()) -> Run:
    groups = [{"page_bytes": 65_536, "layers": 5}]
    engine = EngineInfo(device="cuda", num_blocks=blocks, groups=groups, args=list(args))
    gpu = GpuFacts(driver=driver, memory_bytes=80 << 30, power_limit_w=700.0)
    return run(noise(1), engine=engine, source="engine", extra=Extras(gpus=[gpu]))


def test_what_decides_a_gpus_times_is_named_where_both_runs_recorded_it() -> None:
    (driver,) = mismatches(on_gpu(), on_gpu(driver="570.10"))
    assert (driver.field, driver.a, driver.b) == ("driver", "580.65", "570.10")
    assert not mismatches(on_gpu(), run(noise(1), engine=on_gpu().header.engine, source="engine"))


def test_pools_that_vllm_measured_otherwise_are_named() -> None:
    (pool,) = mismatches(on_gpu(), on_gpu(blocks=9_000))
    assert (pool.field, pool.b) == ("KV cache", "9,000 blocks (measured by vLLM)")
    assert not mismatches(on_gpu(), on_gpu(blocks=9_950)), "half a percent"
    assert not mismatches(on_gpu(), on_gpu(blocks=9_000, args=("--num-gpu-blocks-override", "9000")))
