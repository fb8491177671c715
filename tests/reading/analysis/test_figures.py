"""The table of figures: whatever is compared, searched or drawn has its title, unit and direction there."""

from __future__ import annotations

import pytest

from kvtune.answers.tune.objective import OBJECTIVES as SEARCHED
from kvtune.reading.analysis.comparison.measures import MEASURES, is_timed
from kvtune.reading.analysis.figures import OBJECTIVES, quantity


def test_every_figure_that_is_compared_has_a_direction_and_a_meaning() -> None:
    paths = [*(measure.path for measure in MEASURES), *OBJECTIVES.values()]
    for path in paths:
        assert quantity(path).better in (1, -1) and quantity(path).meaning, path
        assert "{}" not in quantity(path).title


def test_an_objective_is_its_figure() -> None:
    assert [(by.name, by.path, by.better) for by in SEARCHED.values()] == [
        ("hit-rate", "prefix_cache.hit_rate", 1),
        ("ttft", "ttft_ms.mean", -1),
        ("throughput", "throughput_tok_s", 1),
        ("goodput", "goodput.requests_s", 1),
        ("ceiling", "ceiling.tokens_s", 1),
    ]
    assert [by.name for by in SEARCHED.values() if not by.timed] == ["hit-rate"]
    assert is_timed(SEARCHED["ceiling"].path)


@pytest.mark.parametrize(
    ("path", "value", "text", "change"),
    [
        ("prefix_cache.hit_rate", 0.6125, "61.3 %", "+61.3 points"),
        ("ttft_ms.mean", 1083.0, "1.08 s", "+1.08 s"),
        ("throughput_tok_s", 31_042.0, "31,042 tok/s", "+31,042 tok/s"),
        ("ceiling.cpu_us_per_token.engine_core", 23.4, "23 µs", "+23 µs"),
        ("offload.copies.wait_s", 0.0035, "3.5 ms", "+3.5 ms"),
        ("something.else", 12.0, "12", "+12"),
    ],
)
def test_a_value_and_a_difference_have_their_unit(path: str, value: float, text: str, change: str) -> None:
    assert quantity(path).text(value) == text
    assert quantity(path).text(value, signed=True) == change
    assert quantity(path).text(None) == "–"


def test_a_figure_of_a_process_has_its_title() -> None:
    assert quantity("memory.worker_1").title == "worker 1's peak memory"
    assert quantity("gc.front_end.pause_ms.max").title == "front end's collector pauses, longest"
    assert quantity("throughput_tok_s").head_with_unit == "output (tok/s)"
