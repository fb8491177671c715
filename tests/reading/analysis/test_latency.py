from __future__ import annotations

import numpy as np
import pytest

from kvtune.data.run.types import Run
from kvtune.reading.analysis.latency import e2e_ms, itl_ms, token_gaps_ms, ttft_ms
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.spread import Spread, spread
from kvtune.requests.types import Span
from tests.reading.analysis.made import served, table, workload_of


def three() -> Run:
    workload = workload_of([(Span(i, 0, 10),) for i in range(3)])
    # Request 0: tokens at 1.0, 1.1, 1.4; request 1: at 2.0, then three in one piece at 2.6; request 2: none.
    tokens = table("tokens", request=[1, 0, 0, 1, 0], t_s=[2.0, 1.0, 1.4, 2.6, 1.1], count=[1, 1, 1, 3, 1])
    return served(
        workload,
        [0, 0, -1],
        sent=[0.5, 0.0, 3.0],
        first=[1.0, 2.0, np.nan],
        finished=[1.4, 2.6, 9.0],
        finish=["length", "stop", "abort"],
        output=[3, 4, 0],
        tables={"tokens": tokens},
    )


def test_latencies_equal_those_computed_by_hand() -> None:
    run = three()
    assert ttft_ms(run)[:2] == pytest.approx([500, 2000])
    assert np.isnan(ttft_ms(run)[2])
    assert e2e_ms(run)[:2] == pytest.approx([900, 2600])
    assert np.isnan(e2e_ms(run)[2])  # an aborted request took no meaningful time
    assert sorted(itl_ms(run)) == pytest.approx([100, 200, 200, 200, 300])
    sums, counts = token_gaps_ms(run)
    assert sums == pytest.approx([400, 600, 0])
    assert counts.tolist() == [2, 3, 0]


def test_totals_and_rates() -> None:
    latency = RunAnalysis(three()).latency
    assert (latency.requests, latency.finished) == (3, 2)
    assert (latency.prompt_tokens, latency.output_tokens) == (30, 7)
    assert latency.throughput_tok_s == pytest.approx(0.7)
    assert latency.prompt_tok_s == pytest.approx(3.0)
    assert latency.requests_s == pytest.approx(0.2)
    assert latency.ttft_ms.mean == pytest.approx(1250)
    assert latency.ttft_ms.count == 2
    assert latency.itl_ms.p50 == pytest.approx(200)


def test_requests_that_were_never_sent_do_not_count() -> None:
    workload = workload_of([(Span(0, 0, 10),), (Span(1, 0, 20),)])
    run = served(workload, [0, -1], sent=[0.0, np.nan], output=[4, 0], finish=["length", ""])
    latency = RunAnalysis(run).latency
    assert (latency.requests, latency.finished, latency.prompt_tokens) == (1, 1, 10)


def test_a_front_end_that_sends_late_shows_in_the_send_lag() -> None:
    workload = workload_of([(Span(0, 0, 10),), (Span(1, 0, 20),)])
    run = served(workload, [0, 0], sent=[0.0, 3.0])
    run.tables["requests"]["planned_s"][:] = [0.5, 1.0]
    assert RunAnalysis(run).latency.send_lag_ms.max == pytest.approx(2000)
    run.tables["requests"]["planned_s"][:] = np.nan
    assert RunAnalysis(run).latency.send_lag_ms == Spread()


def test_percentiles_equal_numpys() -> None:
    values = np.arange(1000, dtype=np.float64)
    assert spread(values) == Spread(499.5, 499.5, float(np.percentile(values, 99)), 999.0, 1000)
    assert spread(np.array([np.nan, 4.0, np.inf])) == Spread(4.0, 4.0, 4.0, 4.0, 1)
