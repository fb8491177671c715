"""A server over time: the worst minute, what is known of it, and what is marked."""

from __future__ import annotations

import numpy as np
import pytest

from kvtune.data.run.types import Run
from kvtune.reading.analysis.looks import Bounds, Moment, bounds, moments, stretch, timeline
from tests.reading.analysis.made import header_of, table
from tests.reading.analysis.over_time import ten_minutes


def test_the_worst_minute_is_found_and_counted_apart_from_the_rest() -> None:
    told = timeline(ten_minutes())
    assert told is not None and told.worst is not None and told.rest is not None
    worst, rest = told.worst, told.rest
    assert (
        worst.end_s - worst.begin_s == pytest.approx(60) and worst.begin_s + 1 >= 300 and worst.end_s <= 361
    )
    assert worst.first_token.mean_ms == pytest.approx(5000)
    assert rest.first_token.mean_ms == pytest.approx(200, rel=0.05)
    assert worst.first_token.p99_ms == Bounds(2500, 7500) and worst.queue.p99_ms is None
    assert worst.waiting == 30 and worst.stalled_s == pytest.approx(8)
    assert worst.tally is not None and rest.tally is not None
    assert worst.tally.seen is not None and worst.tally.seen[0] == worst.tally.seen[1] == pytest.approx(0.1)
    assert worst.tally.missed == sum(worst.tally.misses.values())
    assert worst.tally + rest.tally == told.whole.tally


def test_restart_lost_looks_stall_and_flood_are_marked() -> None:
    looks = ten_minutes().table("looks")
    assert moments(looks) == (
        Moment("restart", 50.0, 50.5, 1.0),
        Moment("flood", 300.5, 315.5, 30.0),
        Moment("stall", 320.0, 328.0, 8.0),
        Moment("no answer", 500.0, 500.5, 3.0),
    )


def test_a_queue_that_swings_a_little_is_one_flood() -> None:
    waiting = [0, 4, 12, 9, 20, 18, 26, 10, 11, 3, 5]
    at = np.arange(len(waiting))
    found = moments(table("looks", t_s=at, until_s=at + 1, waiting=waiting))
    assert found == (Moment("flood", 1.0, 7.0, 26.0),)


def test_a_quantile_of_a_histogram_is_a_bucket() -> None:
    buckets = {
        "above_s": np.array([1.0, 0.0, 10.0]),
        "upto_s": np.array([10.0, 1.0, np.nan]),
        "count": np.array([40.0, 59.0, 1.0]),
    }
    assert bounds(buckets, 0.5) == Bounds(0, 1000) and bounds(buckets, 0.99) == Bounds(1000, 10000)
    assert bounds(buckets, 0.995) == Bounds(10000, None)
    assert bounds({name: values[:0] for name, values in buckets.items()}, 0.5) is None


def test_what_the_server_does_not_publish_is_unknown_in_every_stretch() -> None:
    run = ten_minutes()
    for name in ("first_tokens", "first_token_s", "came", "output_tokens", "waiting", "stalled_s"):
        run.tables["looks"][name][:] = np.nan
    told = timeline(run)
    assert told is not None and told.worst is None
    whole = told.whole
    assert (whole.came, whole.output_tokens, whole.waiting, whole.stalled_s) == (None, None, None, None)
    assert whole.first_token.count == 0 and whole.first_token.mean_ms is None


def test_without_first_tokens_the_longest_queue_is_the_worst_minute() -> None:
    run = ten_minutes()
    for name in ("first_tokens", "first_token_s"):
        run.tables["looks"][name][:] = np.nan
    told = timeline(run)
    assert told is not None and told.worst is not None and told.worst.waiting == 30


def test_a_run_without_looks_has_no_timeline() -> None:
    assert timeline(Run(header_of())) is None
    assert stretch(ten_minutes(bad=False), np.arange(1200) < 10).waiting == 0
