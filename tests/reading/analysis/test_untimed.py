"""A replay at a nominal step cost has no times: on terminal, page, lists, comparisons and in `--json`."""

from __future__ import annotations

import re

import pytest

from kvtune.answers.tune.objective import objective, refuse_times
from kvtune.base.errors import UsageError
from kvtune.data.run.types import NOMINAL, Run
from kvtune.reading.analysis.comparison.compare import compare
from kvtune.reading.analysis.replayed import beside
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from kvtune.reading.report.sections.verdict import tiles
from tests.golden import synthetic
from tests.reading.report.drawn import run_page


def replayed(fitted: bool) -> Run:
    run = synthetic.sim_run().with_extra(slo={"ttft": 500.0})
    return run.with_extra(step_cost={"fitted": True}) if fitted else run


def test_a_nominal_replay_has_no_times_and_says_why() -> None:
    analysis = RunAnalysis(replayed(fitted=False))
    facts = summary(analysis)
    for name in ("ttft_ms", "itl_ms", "e2e_ms", "send_lag_ms"):
        assert facts[name]["mean"] is None and facts[name]["count"] == 0, name
    assert [facts[name] for name in ("throughput_tok_s", "prompt_tok_s", "requests_s", "goodput")] == [
        None
    ] * 4
    assert all(row["ttft_ms_mean"] is None for row in facts["rounds"])
    assert facts["prefix_cache"]["hit_rate"] is not None
    named = {tile.name: tile for tile in tiles(analysis)}
    assert named.keys().isdisjoint({"Output", "First token", "Between tokens", "Goodput"})
    assert NOMINAL in named["Times"].more
    verdict = analysis.verdict
    words = verdict.limit + verdict.advice + verdict.also
    assert verdict.kind != "load" and "of the time" not in words and "engine's time" not in words, words
    assert "step time" not in words and analysis.step_time.busy_share is None
    assert re.fullmatch(r"Replayed: .*, \d+\.\d % of tokens hit\.", beside(analysis.run))
    page = run_page(analysis)
    assert "Time to first token" not in page and NOMINAL in page


def test_a_replay_at_a_runs_speed_has_predicted_times() -> None:
    analysis = RunAnalysis(replayed(fitted=True))
    facts = summary(analysis)
    assert facts["ttft_ms"]["mean"] > 0 and facts["throughput_tok_s"] > 0 and facts["goodput"] is not None
    assert "Times" not in {tile.name for tile in tiles(analysis)}


def test_a_replay_is_not_called_measured() -> None:
    assert beside(replayed(fitted=True)).startswith("Replayed: ")
    assert beside(synthetic.kvtune_run()).startswith("Measured: ")


def test_no_times_of_nominal_replays_are_compared() -> None:
    made = compare(replayed(fitted=False), replayed(fitted=False))
    assert not [
        figure for figure in made.figures if figure.path.startswith(("ttft", "itl", "e2e", "throughput"))
    ]


def test_a_search_at_a_nominal_cost_refuses_an_objective_that_is_a_time() -> None:
    refuse_times(objective("hit-rate"), "--on sim")
    with pytest.raises(UsageError, match="--on sim has no ttft: its step cost is nominal"):
        refuse_times(objective("hit-rate,ttft"), "--on sim")
