"""The page and the terminal of a recording over time: the worst minute in words, lanes, marks, gaps."""

from __future__ import annotations

import numpy as np

from kvtune.data.run.types import Run
from kvtune.reading.analysis.looks import timeline
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.sections.over_time import LANES, section, words
from tests.reading.analysis.over_time import LOST, ten_minutes
from tests.reading.report.drawn import run_page, summary_text


def said(run: Run) -> str:
    told = timeline(run)
    assert told is not None
    return " ".join(words(run, told))


def test_the_worst_minute_is_said_with_its_traffic_and_its_server() -> None:
    text = said(ten_minutes())
    assert text.startswith("The worst minute was from 15:00:00 to 15:01:00 UTC (in brackets: the rest): "), (
        text
    )
    assert (
        "6 requests a second came (2), with 4,000 prompt tokens a second (1,000), 10.0 % of them seen" in text
    )
    assert "First tokens took 5 s on average (200 ms), the slowest of 100 between 2.5 s and 7.5 s" in text
    assert "up to 30 were waiting (0), 5.0 % of the prompt tokens hit (50.0 %)." in text
    assert (
        "In it, or up to 60 s before: the server generated nothing for 8 s while requests ran; "
        "the queue grew by 30 requests." in text
    )
    assert "restarted" not in text  # that was in another minute


def test_a_steady_recording_has_no_worst_minute() -> None:
    assert said(ten_minutes(bad=False)).startswith(
        "No minute stands out: first tokens took 200 ms on average"
    )


def test_a_queue_that_nobody_waited_in_is_not_said() -> None:
    run = ten_minutes()
    run.tables["looks"]["waiting"][:] = 0
    run.tables["looks"]["queue_s"][:] = 1e-5
    text = said(run)
    assert "First tokens took 5 s" in text and "waiting" not in text and "waited" not in text


def test_what_is_not_known_is_not_said() -> None:
    run = ten_minutes()
    run.tables["looks"]["came"][:] = np.nan
    run.tables["look_misses"]["cause"][:] = "tails"
    text = said(run)
    assert "requests a second came" not in text and "seen before" not in text
    assert "prompt tokens a second" in text


def test_the_page_has_every_lane_and_the_marks_on_one_time_axis() -> None:
    run = ten_minutes()
    run.tables["looks"]["preemptions"][650] = 2
    run.tables["looks"]["evicted_blocks"][:] = 3
    made = section(RunAnalysis(run))
    assert made is not None
    (chart,) = made.charts
    assert list(chart.data) == [lane.name for lane in LANES]
    assert chart.data["marks"]["what"] == ["restart", "flood", "stall", "no answer"]
    queue = chart.data["queue"]
    gap = [n for t, n in zip(queue["t"], queue["n"], strict=True) if t == LOST / 2]
    assert gap == [None, None]
    drawn, looks = chart.data["prompt"], run.table("looks")
    assert sum(n for n in drawn["tokens"] if isinstance(n, int | float)) == looks["query_tokens"].sum() - 500
    assert "3 looks got no answer" in chart.note
    assert {"hit", "never seen before", "kept, then evicted"} == set(drawn["what"])
    page = run_page(RunAnalysis(run))
    assert page.count("The worst minute was from") == 1 and 'id="over_time"' in page
    assert 'id="timeline"' not in page
    assert "The worst minute was from" in " ".join(summary_text(RunAnalysis(run)).split())


def test_the_charts_table_adds_up_and_names_the_marks() -> None:
    run = ten_minutes()
    made = section(RunAnalysis(run))
    assert made is not None
    rows = made.charts[0].grid.rows
    assert len(rows) == 20
    assert sum(row[2].value or 0 for row in rows) == run.table("looks")["query_tokens"].sum()
    assert rows[10][-1].text == "flood, stall" and rows[1][-1].text == "restart"
