"""Replays of a run: which settings help, and what the first line says of the other core."""

from __future__ import annotations

import pytest

from kvtune.data.run.extras import Remedy, Replayed
from kvtune.data.run.types import CoreInfo
from kvtune.reading.analysis.replayed import beside, helping, tried
from tests.golden.synthetic import replace_header, rounds_run

STOCK = Remedy(change="--core stock", core="stock", hit_tokens=300, gain_tokens=-300)
FAILED = Remedy(change="broken", gain_tokens=900, error="no such flag")


def remedy(gain_tokens: int, preemptions: int = 0) -> Remedy:
    return Remedy(change=f"{gain_tokens}, {preemptions}", gain_tokens=gain_tokens, preemptions=preemptions)


def test_what_helps_wins_a_point_and_the_best_comes_first() -> None:
    told = Replayed(query_tokens=1000, other=STOCK, remedies=[remedy(9), remedy(10), FAILED, remedy(500)])
    assert [one.gain_tokens for one in helping(told)] == [500, 10]
    assert len(tried(told)) == 5


def test_equal_gains_keep_their_order_the_cheaper_first() -> None:
    told = Replayed(query_tokens=1000, remedies=[remedy(20, 1), remedy(20, 2)])
    assert [one.preemptions for one in helping(told)] == [1, 2]


def test_what_ends_preemptions_helps_unless_it_costs_a_point_of_hits() -> None:
    told = Replayed(
        requests=100, query_tokens=1000, preemptions=50, remedies=[remedy(-9), remedy(-10), remedy(0, 5)]
    )
    assert [one.change for one in helping(told)] == ["-9, 0"]


@pytest.mark.parametrize(
    ("core", "told", "said"),
    [
        ("kvtune", None, "Measured: kvtune's core, 32.8 % of tokens hit."),
        (
            "kvtune",
            Replayed(query_tokens=1000, hit_tokens=600, other=STOCK),
            "Measured: kvtune's core, 60.0 % of tokens hit. Replayed: stock vLLM, 30.0 %.",
        ),
        (
            "stock",
            Replayed(why="vLLM cannot be imported."),
            "Measured: stock vLLM, 32.8 % of tokens hit; kvtune's core was not replayed: vLLM cannot be imported.",
        ),
        (
            "stock",
            Replayed(other=FAILED),
            "Measured: stock vLLM, 32.8 % of tokens hit; kvtune's core was not replayed: no such flag.",
        ),
    ],
)
def test_the_first_line_says_what_was_measured_and_what_the_other_core_would_do(
    core: str, told: Replayed | None, said: str
) -> None:
    run = replace_header(rounds_run(), core=CoreInfo(name=core, active=core == "kvtune"))
    assert beside(run.with_extra(replayed=told)) == said


def test_a_core_that_was_refused_is_stocks() -> None:
    run = replace_header(rounds_run(), core=CoreInfo(name="kvtune", active=False))
    assert beside(run) == "Measured: stock vLLM, 32.8 % of tokens hit."
