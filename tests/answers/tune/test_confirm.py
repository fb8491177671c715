"""The verdict on the engine: intervals over whole runs, drift, and no winner as a result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtune.answers.tune import confirm as module
from kvtune.answers.tune.confirm import Bout, Contender, judge
from kvtune.answers.tune.objective import OBJECTIVES, objective
from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.trials.run import Answer, PlannedTrial, Trials
from kvtune.data.run.types import EngineInfo, Run
from kvtune.lab.setup.setup import Load, Setup
from tests.answers.tune.trials.answering import answered
from tests.reading.analysis.made import header_of


def side(role: Any, ttft: Sequence[float], hits: float) -> Contender:
    trials = [
        Trial(
            number=i,
            settings={},
            on="engine",
            role=role,
            summary={"ttft_ms": {"mean": t}, "prefix_cache": {"hit_rate": hits}},
        )
        for i, t in enumerate(ttft)
    ]
    return Contender(role, {}, [t.summary for t in trials], trials=trials)  # type: ignore[misc]


@pytest.fixture(autouse=True)
def summaries_for_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison over summaries instead of runs: the rule under test is what follows from its figures."""
    from kvtune.reading.analysis.comparison.compare import Comparison, repeated, value_at
    from kvtune.reading.analysis.comparison.measures import MEASURES

    def compared(a: Sequence[Any], b: Sequence[Any]) -> Comparison:
        figures = []
        for m in MEASURES:
            if m.path in ("ttft_ms.mean", "prefix_cache.hit_rate"):
                one, two = (
                    [v for s in values if (v := value_at(s, m.path)) is not None] for values in (a, b)
                )
                figures.append(repeated(m, one, two))
        return Comparison((), tuple(figures))

    monkeypatch.setattr(module, "compare_repeats", compared)


def test_an_exact_gain_wins() -> None:
    judged = judge(
        side("baseline", [10, 11, 10], 0.3), [side("trial", [9, 9.5], 0.6)], OBJECTIVES["hit-rate"]
    )
    assert judged.winner is judged.leader is not None


def test_the_better_finalist_leads() -> None:
    weak, strong = side("trial", [9, 9], 0.5), side("trial", [9, 9], 0.6)
    assert judge(side("baseline", [10, 10], 0.3), [weak, strong], OBJECTIVES["hit-rate"]).leader is strong


def test_no_difference_is_no_winner() -> None:
    judged = judge(side("baseline", [10, 14, 9], 0.3), [side("trial", [9, 15, 10], 0.3)], OBJECTIVES["ttft"])
    assert judged.winner is None
    assert "no difference" in judged.why


def test_worse_is_no_winner() -> None:
    judged = judge(side("baseline", [10, 10], 0.6), [side("trial", [10, 10], 0.3)], OBJECTIVES["hit-rate"])
    assert judged.winner is None
    assert "worse" in judged.why


def test_a_drift_as_large_as_the_gain_is_no_winner() -> None:
    stock = side("baseline", [14.0, 13.9, 14.0, 13.9, 12.5], 0.3)
    judged = judge(stock, [side("trial", [12.3, 12.35, 12.3, 12.32], 0.3)], OBJECTIVES["ttft"])
    assert judged.drift == pytest.approx(12.5 / 14 - 1)
    assert judged.winner is None
    assert "drifted" in judged.why


def both(ttft: Sequence[float], hits: float) -> Contender:
    return side("trial", ttft, hits)


def test_of_several_objectives_one_must_be_better_and_none_worse() -> None:
    by = objective("hit-rate,ttft")
    stock = side("baseline", [10, 10.1, 9.9], 0.3)
    judged = judge(stock, [both([10.1, 10, 9.9], 0.6)], by)
    assert judged.winner is not None and judged.why.startswith("better than stock in hit-rate, worse in none")
    assert judge(stock, [both([15, 15.1, 14.9], 0.6)], by).winner is None
    assert "worse" in judge(stock, [both([15, 15.1, 14.9], 0.6)], by).why


def test_a_finalist_that_loses_nothing_leads_one_that_gains_more_and_loses() -> None:
    greedy, fair = both([15, 15.1, 14.9], 0.9), both([10, 10.1, 9.9], 0.5)
    judged = judge(side("baseline", [10, 10.1, 9.9], 0.3), [greedy, fair], objective("hit-rate,ttft"))
    assert judged.winner is fair


def test_failed_finalists_are_reported() -> None:
    broken = Contender("trial", {}, failed="out of memory")
    judged = judge(side("baseline", [10, 10], 0.3), [broken], OBJECTIVES["hit-rate"])
    assert judged.winner is None
    assert "out of memory" in judged.why


@pytest.mark.parametrize(
    ("device", "args", "pinned"),
    [
        ("cuda", [], ["--num-gpu-blocks-override", "5000"]),
        ("cuda", ["--kv-cache-memory-bytes", "4G"], ["--kv-cache-memory-bytes", "4G"]),
        ("cpu", [], []),
    ],
)
def test_finalists_have_the_pool_of_stocks_first_run(
    device: str, args: list[str], pinned: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At each start a GPU's free memory would give another pool."""
    given: list[list[str]] = []
    stock = Run(header_of(engine=EngineInfo(device=device, num_blocks=5000, block_size=16)))

    def played(trials: Trials, plan: PlannedTrial) -> Answer:
        given.append(trials.setup.engine_args)
        return Answer()

    answered(monkeypatch, played)
    monkeypatch.setattr(module, "read_run", lambda file: stock)
    bench = Setup(model="m", load=Load(spec="decode", seed=0, hash=""), engine_args=args, core="kvtune")
    with StudyJournal(tmp_path / "j.jsonl", "tune", bench) as journal:
        bout = Bout(Trials(bench, journal))
        baseline = Contender("baseline", {})
        bout.run((baseline, Contender("trial", {"slack": 64})), 1)
        bout.run((baseline,), 2)
    assert given == [args, pinned, pinned]


@pytest.mark.parametrize(
    ("first", "by", "ran"),
    [
        (0.6, "hit-rate", "stock a a stock"),
        (0.4, "hit-rate", "stock a a stock b b stock"),  # less than its replay promised, and than b's
        (0.3, "hit-rate", "stock a a stock b b stock"),  # no winner
        (0.6, "ttft", "stock a b b a stock stock"),
    ],
)
def test_a_finalist_that_cannot_win_by_its_replays_hits_is_not_run(
    first: float, by: str, ran: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rates = {"stock": 0.3, "a": first, "b": 0.5}
    runs: list[str] = []

    def played(trials: Trials, plan: PlannedTrial) -> Answer:
        runs.append(str(plan.settings.get("policy", "stock")))
        return Answer(summary_of(runs[-1]), run_file=runs[-1])

    def summary_of(name: str) -> dict[str, Any]:
        return {
            "ttft_ms": {"mean": 10.0},
            "prefix_cache": {"hit_rate": rates[name]},
            "core": {"active": True},
        }

    answered(monkeypatch, played)
    monkeypatch.setattr(module, "read_run", lambda file: summary_of(file.name))
    monkeypatch.setattr(Bout, "_pin", lambda bout: None)
    replayed = {"a": 0.6, "b": 0.5} if by == "hit-rate" else {}
    sides = [Contender("trial", {"policy": name}, replayed=replayed.get(name)) for name in "ab"]
    bout = Bout(Trials(Setup(model="m", load=Load(spec="decode", seed=0, hash=""), core="kvtune")))
    confirmed = module.confirm(bout, Contender("baseline", {}), sides, OBJECTIVES[by], rounds=2, budget_s=1e9)
    assert " ".join(runs) == ran
    assert [side.settings["policy"] for side in confirmed.finalists] == sorted({*runs} - {"stock"})
