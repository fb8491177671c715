"""What preemptions cost, by request and cause: figures computed by hand, and their words."""

from __future__ import annotations

import pytest

from kvtune.data.run.types import Run
from kvtune.reading.analysis.preemption import preemption
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from kvtune.reading.report.sections.verdict import tiles
from kvtune.requests.types import Span
from tests.reading.analysis.made import served, table, workload_of


def run_of(preemptions: list[int], source: str = "sim") -> Run:
    steps = table("steps", t_s=[0.0, 0.5], scheduled_tokens=[300, 100])
    run = served(workload_of([[Span(1, 0, 100)]] * 3), [0, 0, 0], source=source, tables={"steps": steps})
    run.table("requests")["preemptions"][:] = preemptions
    twice = {"1": {"evicted": 30, "partial_block": 4}, "2": {"evicted": 6}, "99": {"evicted": 1}}
    return run.with_extra(computed_twice=twice)


def test_tokens_are_summed_by_cause_and_the_worst_requests_named() -> None:
    found = preemption(run_of([0, 2, 1]))
    assert found is not None
    assert (found.preemptions, found.requests, found.tokens) == (3, 2, 40), "row 99 is no request"
    assert found.causes == {"evicted": 36, "partial_block": 4} and found.share == pytest.approx(0.1)
    assert list(found.worst) == ["1", "2"]
    assert sum(sum(one.values()) for one in found.worst.values()) == found.tokens


def test_json_and_the_first_screen_have_them() -> None:
    analysis = RunAnalysis(run_of([0, 2, 1]))
    plain = summary(analysis)["preempted"]
    assert plain["tokens"] == sum(plain["causes"].values()) == 40
    tile = next(one for one in tiles(analysis) if one.name == "Preempted")
    assert (tile.value, tile.more) == ("2", "requests, 3 x, 40 tokens computed twice, 10.0 % of all computed")


def test_an_engines_run_has_them_where_its_probe_counted_and_a_run_without_preemptions_has_none() -> None:
    counted = run_of([0, 2, 1], source="engine")
    assert (told := preemption(counted)) is not None and told.tokens == 40
    engine = preemption(older := counted.with_extra(computed_twice={}))
    assert engine is not None and engine.tokens is None and engine.share is None
    tile = next(one for one in tiles(RunAnalysis(older)) if one.name == "Preempted")
    assert tile.more == "requests, 3 x; tokens computed twice were not recorded"
    assert (
        preemption(run_of([0, 0, 0])) is None and summary(RunAnalysis(run_of([0, 0, 0])))["preempted"] is None
    )
