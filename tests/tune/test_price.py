"""Host memory with a price: what an objective says after it, which size wins, and what holds on the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvtune.analysis.comparison.measures import MEASURES
from kvtune.analysis.comparison.repeats import Comparison, _figure, value_at
from kvtune.analysis.study import Bench, Settings, Trial
from kvtune.errors import UsageError
from kvtune.tune import confirm as confirming
from kvtune.tune.confirm import Contender, judge
from kvtune.tune.objective import objective, price_note
from kvtune.tune.recipes.make import bench_of, simulated_recipe
from kvtune.tune.sweep import PlannedTrial, result, sim_trial
from kvtune.tune.trials.simulated import SimPool

GIB = 1 << 30


def summary(gib: float, hits: float, ttft: float = 10.0) -> dict[str, Any]:
    tier = {"tier_bytes": int(gib * GIB), "tier_hit_rate": hits / 2} if gib else None
    cache = {"hit_rate": hits, "query_tokens": 1000, "hit_tokens": round(1000 * hits)}
    return {"prefix_cache": cache, "ttft_ms": {"mean": ttft}, "offload": tier}


def trial(number: int, gib: float, hits: float, **more: Any) -> Trial:
    settings: Settings = {"kv_offloading_size": gib}
    return Trial(number=number, settings=settings, on="sim", summary=summary(gib, hits), **more)


STOCK = Trial(number=0, settings={}, on="sim", core="stock", role="baseline", summary=summary(0, 0.05))
SIZES = [STOCK, trial(1, 1, 0.2), trial(2, 2, 0.3), trial(3, 4, 0.4), trial(4, 8, 0.4)]


def test_an_objective_with_a_price_is_read_and_written_again() -> None:
    by = objective("hit-rate:gib=0.5, ttft")
    assert (by.name, by.gib_price, by.texts) == ("hit-rate", 0.5, ("hit-rate:gib=0.5", "ttft"))
    assert objective(",".join(by.texts)) == by
    assert objective("hit-rate:gib=0").text == "hit-rate"
    assert "0.5 points of hit-rate" in price_note(by) and price_note(objective("ttft")) == ""


@pytest.mark.parametrize(
    "text", ["hit-rate:gib", "hit-rate:gib=", "ttft:gib=x", "ttft:gib=-1", "ttft:gib=nan", "ttft:mib=1"]
)
def test_a_price_that_is_none_is_refused_in_words(text: str) -> None:
    with pytest.raises(UsageError, match="no price of host memory") as refused:
        objective(text)
    assert ":gib=NUMBER, the " in refused.value.hint


def test_the_price_is_paid_in_the_figures_own_unit() -> None:
    """Half a point for each of 4 GiB; 3 ms for each."""
    assert objective("hit-rate:gib=0.5").net(summary(4, 0.4)) == pytest.approx(0.38)
    assert objective("ttft:gib=3").net(summary(4, 0.4, 10.0)) == pytest.approx(22.0)
    assert objective("ttft:gib=3").score(summary(4, 0.4, 10.0)) == pytest.approx(-22.0)
    assert objective("hit-rate:gib=0.5").net(summary(0, 0.4)) == 0.4


@pytest.mark.parametrize(("price", "best"), [("0", 3), ("2", 3), ("7", 2), ("11", 1), ("50", 1)])
def test_a_higher_price_takes_a_smaller_size_and_none_the_smallest_that_hits_most(
    price: str, best: int
) -> None:
    found = result(SIZES, objective(f"hit-rate:gib={price}"))
    assert found.best is not None and found.best.number == best
    assert found.verdict.winner == (price in ("0", "2", "7", "11")), "at 50 points a GiB stock is better"


def test_a_recipe_keeps_the_price_with_which_it_is_verified() -> None:
    bench = Bench(model="m", spec="rounds", seed=0, workload_hash="w", vllm="0.32.0")
    made = simulated_recipe(bench, objective("hit-rate:gib=7"), SIZES[2], STOCK, 4)
    bench_of(made, "r", model="m")
    assert made.evidence["objective"] == "hit-rate:gib=7"
    assert made.evidence["simulated"] == pytest.approx(0.3 - 2 * 0.07)


def side(role: Any, gib: float, hits: list[float]) -> Contender:
    trials = [
        Trial(number=i, settings={}, on="engine", role=role, summary=summary(gib, rate))
        for i, rate in enumerate(hits)
    ]
    return Contender({}, role, trials, [t.summary for t in trials])  # type: ignore[arg-type]


@pytest.fixture
def runs_are_summaries(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(a: list[Any], b: list[Any]) -> Comparison:
        (hit_rate,) = (m for m in MEASURES if m.path == "prefix_cache.hit_rate")
        one, two = ([float(value_at(s, hit_rate.path) or 0) for s in side] for side in (a, b))
        return Comparison((), (_figure(hit_rate, one, two, ""),))

    monkeypatch.setattr(confirming, "compare_repeats", compared)


@pytest.mark.usefixtures("runs_are_summaries")
def test_on_the_engine_too_a_setting_wins_after_the_price_alone() -> None:
    """A quarter of the memory, a point less hit: worse by hits, better at more than a third of a point a GiB."""
    stock, small = side("baseline", 4, [0.40, 0.40]), side("trial", 1, [0.39, 0.39])
    assert judge(stock, [small], objective("hit-rate")).winner is None
    assert judge(stock, [small], objective("hit-rate:gib=0.1")).winner is None
    judged = judge(stock, [small], objective("hit-rate:gib=0.5"))
    assert judged.winner is small and "better than stock in hit-rate:gib=0.5" in judged.why
    raw, after = judged.figures
    assert (raw.path, raw.verdict) == ("prefix_cache.hit_rate", "worse"), "hits stay hits"
    assert (after.path, after.verdict) == ("hit-rate:gib=0.5", "better")
    assert (after.a, after.b) == (pytest.approx(0.38), pytest.approx(0.385))


@pytest.mark.usefixtures("runs_are_summaries")
def test_a_price_leaves_the_interval_as_wide_as_it_was() -> None:
    stock, small = side("baseline", 4, [0.40, 0.44]), side("trial", 1, [0.39, 0.41])
    raw, after = judge(stock, [small], objective("hit-rate:gib=0.5")).figures
    assert raw.low is not None and raw.high is not None and after.low is not None and after.high is not None
    assert after.high - after.low == pytest.approx(raw.high - raw.low)
    assert after.low - raw.low == pytest.approx(3 * 0.005)


MIB = 1 / 1024
"""Of a GiB. A token of the model has 1 KiB of KV."""
BENCH = Bench(
    model="tiny-llama",
    spec="zipf:prefixes=12,prefix=500,requests=80,output=4",
    seed=0,
    workload_hash="",
    engine_args=["--num-gpu-blocks-override", "60", "--block-size", "32", "--max-model-len", "1024"],
    block_tokens=32,
)


@pytest.fixture(scope="module")
def replays() -> Iterator[list[Trial]]:
    """Stock without a tier, then sizes of which the last two hold every prefix."""
    pytest.importorskip("vllm", reason="needs vLLM")
    sizes = [2 * MIB, 4 * MIB, 32 * MIB, 64 * MIB]
    planned = [PlannedTrial({}, "baseline", stock=True)]
    planned += [PlannedTrial({"kv_offloading_size": size}) for size in sizes]
    with SimPool(BENCH) as pool:
        for number, each in enumerate(planned):
            pool.submit(number, each.settings, stock=each.stock)
        answers = dict(pool.next_done() for _ in planned)
    yield [sim_trial(BENCH, number, planned[number], answers[number]) for number in sorted(answers)]


@pytest.mark.vllm
@pytest.mark.timeout(300)
def test_replays_of_a_tier_at_four_sizes_are_ranked_by_price(replays: list[Trial]) -> None:
    hits = [objective("hit-rate").of(t.summary) or 0.0 for t in replays]
    assert hits[1] < hits[2] < hits[3] == hits[4], hits
    free, dear = result(replays, objective("hit-rate")), result(replays, objective("hit-rate:gib=100000"))
    assert free.best is not None and free.best.number == 3, "the biggest that still gains"
    assert dear.best is not None and dear.best.number == 1, "the smallest"
    (curve,) = free.tier_curves
    assert [point.hit_rate for point in curve.points] == hits[1:]
