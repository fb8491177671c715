"""Slow tokens for people: one line a cause and a stall, the same on terminal and page."""

from __future__ import annotations

from typing import Any

import pytest

from kvtune.analysis.run import RunAnalysis
from kvtune.analysis.summary import summary
from kvtune.report.console.summary import summary_text
from kvtune.report.stalls import cause_rows, lead, why
from tests.analysis.stall_runs import ENGINE_CORE, FRONT_END, WORKER, Toy


def facts(toy: Toy) -> dict[str, Any]:
    return summary(RunAnalysis(toy.run()))


def collecting() -> Toy:
    toy = Toy(in_step={50: 0.5}, lines=["/x/lib/python3.11/site-packages/vllm/v1/core.py:12"])
    toy.gc = [(ENGINE_CORE, float(toy.times()[0][50]), 0.5, 0.5, 2, 1)]
    return toy


def stopped(process: int) -> Toy:
    toy = Toy(in_step={50: 0.5}) if process != FRONT_END else Toy(way={50: 0.5})
    toy.stopped = [(process, float(toy.times()[1][50]) + (0.1 if process == FRONT_END else -0.1))]
    return toy


@pytest.mark.parametrize(
    ("toy", "line"),
    [
        (Toy(prefill={50: 8000}), "prefill of other requests in the same step: prompt-50 (8,000 prompt tokens)"),
        (collecting(), "a garbage collection in EngineCore: generation 2, 500 ms, set off at vllm/v1/core.py:12"),
        (stopped(WORKER), "a process had no CPU: worker, a signal had stopped it"),
        (stopped(FRONT_END), "a process had no CPU: front end, a signal had stopped it"),
        (Toy(in_step={50: 0.5}), "the step took longer than its work: 510 ms, its work takes 10 ms"),
        (Toy(before={50: 0.5}), "EngineCore took long between two steps"),
        (Toy(way={50: 0.5}), "the front end took the tokens late"),
    ],
)  # fmt: skip
def test_the_worst_stall_is_one_line_on_the_terminal(toy: Toy, line: str) -> None:
    found = facts(toy)
    assert why(found["stalls"]["worst"][0]) == line
    assert line in summary_text(found, width=200)


def test_the_account_says_how_many_gaps_over_which_limit_and_all_causes() -> None:
    found = facts(Toy(in_step={50: 0.5}, before={70: 0.125}))
    assert lead(found["stalls"]) == (
        "8 of 396 gaps between deliveries of tokens were over 22 ms (twice their median), in 2 stalls: "
        "2.5 s more than the median in sum."
    )
    assert cause_rows(found["stalls"]) == [
        ("the step took longer than its work", "4", "2 s", "80.0 %"),
        ("EngineCore took long between two steps", "4", "500 ms", "20.0 %"),
    ]


def test_a_run_without_slow_tokens_says_nothing_of_them() -> None:
    found = facts(Toy())
    assert lead(found["stalls"]) == "" and "slow tokens" not in summary_text(found, width=200)
