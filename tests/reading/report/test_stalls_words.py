"""Slow tokens for people: one line a cause and a stall, the same on terminal and page."""

from __future__ import annotations

import pytest

from kvtune.data.show.markdown import markdown
from kvtune.data.show.page import document_page
from kvtune.data.show.parts import Grid
from kvtune.data.show.screen import print_document
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.report.comparison import document
from kvtune.reading.report.contrast import RunGroup, contrast, slow_tokens
from kvtune.reading.report.sections.stalls import advice, lead, section, why
from tests.reading.analysis.stall_runs import ENGINE_CORE, FRONT_END, WORKER, Toy
from tests.reading.report.drawn import summary_text


def analysed(toy: Toy) -> RunAnalysis:
    return RunAnalysis(toy.run())


def texts(table: Grid) -> list[tuple[str, ...]]:
    return [tuple(cell.text for cell in row) for row in table.rows]


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
        (stopped(WORKER), "a process waited for a CPU: worker, a signal had stopped it"),
        (stopped(FRONT_END), "a process waited for a CPU: front end, a signal had stopped it"),
        (Toy(in_step={50: 0.5}), "the step took longer than its work: 510 ms, its work takes 10 ms"),
        (Toy(before={50: 0.5}), "EngineCore took long between two steps"),
        (Toy(way={50: 0.5}), "the front end took the tokens late"),
    ],
)  # fmt: skip
def test_the_worst_stall_is_one_line_on_the_terminal(toy: Toy, line: str) -> None:
    found = analysed(toy)
    assert why(found.stalls.worst[0]) == line
    text = summary_text(found, width=200)
    assert line in text and advice(found.stalls) in text


def test_the_account_says_how_many_gaps_over_which_limit_and_all_causes() -> None:
    found = analysed(Toy(in_step={50: 0.5}, before={70: 0.125}))
    assert lead(found.stalls) == (
        "8 of 396 gaps between deliveries of tokens were over 22 ms (twice their median), in 2 stalls: "
        "2.5 s above the median in total."
    )
    made = section(found)
    assert made is not None and texts(made.tables[0]) == [
        ("the step took longer than its work", "4", "2 s", "80.0 %"),
        ("EngineCore took long between two steps", "4", "500 ms", "20.0 %"),
    ]


def test_a_run_without_slow_tokens_says_nothing_of_them() -> None:
    found = analysed(Toy())
    assert section(found) is None and "slow tokens" not in summary_text(found, width=200)


def test_a_comparison_shows_the_causes_of_both_sides_beside_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [Toy(in_step={50: 0.5}).run(), Toy(in_step={50: 0.5}, before={70: 0.5}).run()]
    made = contrast(runs, ["a", "b"])
    table = slow_tokens(made.sides)
    assert table is not None and texts(table) == [
        ("a gap is slow over", "22 ms", "22 ms"),
        ("all slow gaps", "4 gaps, 2 s (100.0 %)", "8 gaps, 4 s (100.0 %)"),
        ("the step took longer than its work", "4 gaps, 2 s (100.0 %)", "4 gaps, 2 s (50.0 %)"),
        ("EngineCore took long between two steps", "0 gaps, 0 µs (0.0 %)", "4 gaps, 2 s (50.0 %)"),
    ]
    row = "EngineCore took long between two steps"
    shown = document(made)
    assert row in markdown(shown) and row in document_page(shown)
    print_document(shown)
    assert row in capsys.readouterr().out


def test_repeated_runs_of_a_side_are_shown_as_their_mean() -> None:
    side = [analysed(Toy(in_step={50: seconds})) for seconds in (0.5, 0.25)]
    table = slow_tokens([RunGroup("a", tuple(side), ())])
    assert table is not None and ("all slow gaps", "4 gaps, 1.5 s (100.0 %)") in texts(table)
    assert slow_tokens([RunGroup("a", (analysed(Toy()),), ())]) is None


def test_the_page_has_a_window_of_each_of_the_worst() -> None:
    toy = collecting()
    toy.before = {70: 0.3}
    made = section(RunAnalysis(toy.run()))
    assert made is not None and [chart.id for chart in made.charts] == ["stall-1", "stall-2"]
    first = made.charts[0]
    assert "Request r0, 4 gaps at once. A garbage collection in EngineCore" in first.label
    lanes = first.data["stall-1"]["lane"]
    assert set(lanes) == {
        "slow gap",
        "EngineCore's steps",
        "collections, EngineCore",
        "taken by the front end",
        "tokens of the request",
    }
    gap = lanes.index("slow gap")
    ends = first.data["stall-1"]["to"][gap] - first.data["stall-1"]["from"][gap]
    assert ends == pytest.approx(0.511, abs=1e-4)
    assert "Run with kvtune's core" in made.notes[0]
    assert section(RunAnalysis(Toy().run())) is None


def test_a_stop_and_a_wait_are_drawn_between_the_samples_around_them() -> None:
    toy = stopped(WORKER)
    begin = float(toy.times()[0][50])
    toy.waits = {FRONT_END: [(begin, 0.0), (begin + 0.2, 0.15), (begin + 0.4, 0.151)]}
    toy.stopped = [(WORKER, begin - 0.05), (WORKER, begin + 0.3)]
    made = section(RunAnalysis(toy.run()))
    assert made is not None
    data = made.charts[0].data["stall-1"]
    bars = dict(zip(data["lane"], zip(data["kind"], data["text"], strict=True), strict=True))
    assert bars["no CPU, worker"] == ("stopped", "stopped by a signal")
    assert bars["no CPU, front end"] == ("waited for a CPU", "waited 150 ms in this time")
    assert data["lane"].count("no CPU, front end") == 1
