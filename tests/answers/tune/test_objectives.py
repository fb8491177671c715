"""Several objectives, limits for goodput, and what a search over them hands to the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtune.answers.tune.objective import axes, front, objective
from kvtune.answers.tune.recipes.make import simulated_recipe
from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.ties import finalists
from kvtune.answers.tune.trials import setup as setups
from kvtune.base.errors import UsageError
from kvtune.data.run.slo import read_slo
from kvtune.lab.setup.setup import Load, Setup
from kvtune.reading.analysis.latency import e2e_ms, ttft_ms
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from tests.golden import synthetic

SLO = {"ttft": 500.0, "tpot": 50.0}


def trial(number: int, ttft: float, rate: float) -> Trial:
    result = {"ttft_ms": {"mean": ttft}, "throughput_tok_s": rate, "prefix_cache": {"hit_rate": 0.5}}
    return Trial(number=number, settings={"slack": number}, on="sim", summary=result)


@pytest.mark.parametrize(
    "text", ["ttft", "ttft=", "ttft=-1", "ttft=nan", "speed=3", "ttft=1,tpot=x", "e2e=inf"]
)
def test_limits_that_are_none_are_named(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_slo(text)
    assert "tpot (mean time per token" in caught.value.hint


def test_limits_are_read_in_milliseconds() -> None:
    assert read_slo("ttft=500, tpot=50ms") == SLO
    assert read_slo("") == {}


def test_goodput_counts_requests_that_kept_every_limit() -> None:
    run = synthetic.kvtune_run()
    assert RunAnalysis(run).goodput is None and summary(RunAnalysis(run))["goodput"] is None
    waits = ttft_ms(run)
    ended = np.isfinite(e2e_ms(run))
    limit = float(np.median(waits[np.isfinite(waits)]))
    goodput = RunAnalysis(run.with_extra(slo={"ttft": limit})).goodput
    assert goodput is not None
    kept = int((ended & (waits <= limit)).sum())
    assert 0 < kept < ended.sum()
    assert goodput["requests"] == kept
    assert goodput["requests_s"] == pytest.approx(kept / run.header.wall_s)
    strict = RunAnalysis(run.with_extra(slo={"ttft": limit, "e2e": 1e-6})).goodput
    assert strict is not None and strict["requests"] == 0 and strict["share"] == 0.0


def test_requests_that_did_not_end_keep_nothing() -> None:
    run = synthetic.partial_run()
    goodput = RunAnalysis(run.with_extra(slo={"e2e": 1e12})).goodput
    assert goodput is not None and goodput["requests"] == int(np.isfinite(e2e_ms(run)).sum())
    assert RunAnalysis(synthetic.empty_run().with_extra(slo=SLO)).goodput["requests"] == 0  # type: ignore[index]


def test_goodput_without_limits_is_refused_where_a_study_begins() -> None:
    assert objective("goodput").names == ("goodput",)
    with pytest.raises(UsageError, match="limits"):
        objective("ttft,goodput", slo={})
    assert objective("ttft,goodput", slo=SLO).names == ("ttft", "goodput")


@pytest.mark.parametrize("text", ["", "speed", "ttft,", "ttft,speed"])
def test_unknown_objectives_are_named(text: str) -> None:
    with pytest.raises(UsageError, match="there is no objective"):
        objective(text)


def test_a_front_is_over_all_that_was_asked() -> None:
    trials = [trial(0, 10, 5), trial(1, 20, 9), trial(2, 15, 4), trial(3, 20, 9)]
    by = objective("ttft,throughput")
    assert [t.number for t in front(trials, axes(by))] == [0, 1]
    assert [o.name for o in axes(objective("hit-rate"))] == ["ttft", "throughput", "hit-rate"]


def test_finalists_of_several_objectives_are_each_ones_best_first() -> None:
    trials = [trial(0, 10, 5), trial(1, 20, 9), trial(2, 12, 7), trial(3, 30, 1)]
    by = objective("ttft,throughput")
    assert [t.number for t in finalists(trials, by, 2)] == [0, 1]
    assert [t.number for t in finalists(trials, by, 9)] == [0, 1, 2]
    assert [t.number for t in finalists(trials, objective("ttft"), 2)] == [0, 2]


def test_a_recipe_keeps_objectives_and_limits() -> None:
    slo_bench = Setup(
        model="m", load=Load(spec="rounds", seed=0, hash="w", slo=SLO), vllm="0.32.0", core="kvtune"
    )
    by = objective("goodput,ttft")
    recipe = simulated_recipe(slo_bench, by, trial(1, 10, 5), trial(0, 20, 5), 2)
    bench = Setup.of_recipe(recipe, "r", model="m")
    assert bench.load.slo == SLO
    assert objective(str(recipe.evidence["objective"])).names == ("goodput", "ttft")


def test_a_study_in_a_database_goes_on_with_its_own_journal(tmp_path: Path) -> None:
    def path(url: str, **changes: Any) -> Path:
        plain = {"model": "m", "spec": "rounds:prefixes=2", "seed": 0, "workload_hash": "w"}
        slo_bench = Setup.of_file({**plain, **changes})
        return setups.stored_study_path(url, tmp_path, slo_bench)

    assert path("postgresql://a/b") == path("postgresql://a/b")
    assert len({path("postgresql://a/b"), path("postgresql://a/c"), path("postgresql://a/b", slo=SLO)}) == 3
    assert path("postgresql://a/b").parent == tmp_path
