"""The flame graph: from py-spy's recording to boxes, and to a chart with its numbers as text."""

from __future__ import annotations

from typing import Any

from kvtune.data.run.extras import StackFunction, StackSamples
from kvtune.data.run.types import Run
from kvtune.lab.engine.stacks import flame, of_loops, top_functions
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.sections.stacks import section
from tests.golden.synthetic import HOSTILE
from tests.reading.report.drawn import run_of, run_page

FRAMES = [
    {"name": name, "file": "f.py", "line": i} for i, name in enumerate(("loop", "step", "poll", HOSTILE))
]
PROFILE: dict[str, Any] = {
    "shared": {"frames": FRAMES},
    "profiles": [
        {"samples": [[0, 1, 3], [0, 1]], "weights": [3, 1]},
        {"samples": [[0, 2], []], "weights": [5, 1]},
    ],
}


def test_boxes_stand_inside_their_callers_and_shares_are_of_all_samples() -> None:
    boxes = {(depth, name): (start, share) for depth, start, share, name, _, _ in flame(PROFILE)}
    assert boxes == {
        (0, "loop"): (0.0, 0.9),
        (1, "poll"): (0.0, 0.5),
        (1, "step"): (0.5, 0.4),
        (2, HOSTILE): (0.5, 0.3),
    }


def test_boxes_are_bounded() -> None:
    wide = {
        "shared": {"frames": [{"name": str(i)} for i in range(2000)]},
        "profiles": [{"samples": [[0, i] for i in range(1, 2000)], "weights": [1] * 1999}],
    }
    assert len(flame(wide, least_share=0.0, most=100)) == 100
    assert len(flame(wide)) == 1, "all but the root are below the least share"
    assert flame({}) == []


def test_threads_that_only_wait_are_left_out() -> None:
    frames = [{"name": n} for n in ("EngineCoreProc.run_busy_loop", "step", "Condition.wait")]
    threads = [{"samples": [[0, 1], [0]], "weights": [3, 1]}, {"samples": [[2]], "weights": [40]}]
    loops = of_loops({"shared": {"frames": frames}, "profiles": threads})
    assert loops is not None
    assert [(f.function, f.share) for f in top_functions(loops)] == [
        ("step", 0.75),
        ("EngineCoreProc.run_busy_loop", 0.25),
    ]
    assert of_loops(PROFILE) is None, "no loop of vLLM's: all threads are drawn"
    assert of_loops({}) is None


def with_stacks() -> Run:
    run = run_of("rounds")
    top = [StackFunction(function="step", file="f.py", line=1, share=0.4)]
    samples = StackSamples(file="x.json", rate_hz=100, top=top, flame=flame(PROFILE))
    return run.with_extra(stacks={"engine_core": samples})


def test_the_page_draws_it_with_its_numbers_and_as_text() -> None:
    drawn = section(RunAnalysis(with_stacks()))
    assert drawn is not None
    assert [chart.title.split(": ")[1] for chart in drawn.charts] == [
        "where the time was spent",
        "flame graph",
    ]
    assert len(drawn.charts[1].grid.rows) == 4
    assert "<img src=x" not in run_page(RunAnalysis(with_stacks()))
