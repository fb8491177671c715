"""Experiments: their order, what ends them, what a failed run means, and the journal from which they resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtune.engine.experiment import BASELINE, INTERRUPTED, Progress, RunFiles, Side, experiment, order
from kvtune.errors import KvtuneError, UsageError


def sides(*names: str) -> list[Side[Any]]:
    return [Side(name, {}) for name in (BASELINE, *names)]


class Measured:
    """Stands in for an engine: the next of `outcomes` is raised if it is an error, else the run's number returned."""

    def __init__(self, *outcomes: BaseException | None) -> None:
        self.outcomes: Iterator[BaseException | None] = iter(outcomes)
        self.made: list[str] = []

    def __call__(self, side: Side[int]) -> int:
        self.made.append(side.name)
        if error := next(self.outcomes, None):
            raise error
        return len(self.made)


@pytest.mark.parametrize(("count", "repeats"), [(1, 1), (3, 4), (10, 3)])
def test_the_order_is_interleaved(count: int, repeats: int) -> None:
    pairs = list(order(count, repeats))
    assert Counter(side for _, side in pairs) == dict.fromkeys(range(count), repeats)
    assert [repeat for repeat, _ in pairs] == sorted(repeat for repeat, _ in pairs)
    if repeats >= 2 and count > 1:
        first = [v for r, v in pairs if r == 0]
        assert [v for r, v in pairs if r == 1] == first[::-1]
    if repeats >= 3 and count > 2:
        assert len({tuple(v for r, v in pairs if r == n) for n in range(repeats)}) > 1


def test_a_side_that_failed_is_not_run_again_and_the_others_go_on() -> None:
    one, two, three = sides("a", "b")
    measured = Measured(None, KvtuneError("no memory"))
    assert experiment([one, two, three], 2, measured).why == ""
    assert measured.made == [BASELINE, "a", "b", "b", BASELINE]
    assert two.failed == "no memory" and two.runs == []
    assert one.runs == [1, 5] and three.runs == [3, 4]


def test_without_its_baseline_an_experiment_ends() -> None:
    both = sides("a")
    died = KvtuneError("died")
    ended = experiment(both, 3, Measured(None, None, None, died))
    assert ended.why == "the baseline failed: died" and ended.error is died
    assert [side.runs for side in both] == [[1], [2, 3]]


@pytest.mark.parametrize("stop", [KvtuneError("stopped", "", 130), KeyboardInterrupt()])
def test_ctrl_c_ends_it_and_what_was_measured_stays(stop: BaseException) -> None:
    both = sides("a")
    ended = experiment(both, 3, Measured(None, stop))
    assert ended.why == INTERRUPTED and ended.error is stop
    assert both[0].runs == [1] and both[1].failed == ""


def test_no_run_begins_that_would_exceed_the_budget() -> None:
    now: list[float] = [0.0]
    shown: list[Progress] = []

    def measure(side: Side[int]) -> int:
        now[0] += 30.0
        return 0

    both = sides("a")
    ended = experiment(both, 3, measure, budget_s=100.0, before=shown.append, clock=lambda: now[0])
    assert sum(len(side.runs) for side in both) == 3 and "the budget of 1.66" in ended.why
    assert [(p.number, p.total, p.run_s, p.left_s) for p in shown] == [
        (1, 6, None, None),
        (2, 6, 30.0, 150.0),
        (3, 6, 30.0, 120.0),
    ]
    both, now[0] = sides("a"), 0.0
    experiment(both, 3, measure, budget_s=0.0, least=2, clock=lambda: now[0])
    assert [len(side.runs) for side in both] == [2, 2]


def test_earlier_runs_count_and_enough_ends_it() -> None:
    both = sides("a")
    both[0].runs.append(0)
    kept = {BASELINE: [7], "a": [8, 9]}
    measured = Measured()
    ended = experiment(
        both,
        4,
        measured,
        kept=lambda side: kept[side.name].pop(0) if kept[side.name] else None,
        least=2,
        enough=lambda: len(both[1].runs) == 3,
    )
    assert ended.why == "" and both[0].runs == [0, 7, 2] and both[1].runs == [8, 9, 1]


def files(path: Path, measured: Measured) -> RunFiles:
    def make(side: Side[Path]) -> Path:
        made = path.with_name(f"{measured(side)}.kvrun")
        made.touch()
        return made

    return RunFiles(path, make)


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_after_a_crash_at_any_byte_only_the_last_run_is_made_again(tmp_path: Path, cut: int) -> None:
    path, measured = tmp_path / "a.jsonl", Measured()
    journal = files(path, measured)
    experiment(sides("a"), 1, journal.measure, kept=journal.kept)
    path.write_bytes(path.read_bytes()[:-cut])
    for made in (3, 3):
        journal, both = files(path, measured), sides("a")
        assert journal.held(both[0]) == 1
        experiment(both, 1, journal.measure, kept=journal.kept, seconds=journal.seconds)
        assert (
            len(measured.made) <= made and [run.is_file() for side in both for run in side.runs] == [True] * 2
        )
    journal.end()
    assert not path.exists() and files(path, measured).held(both[0]) == 0


def test_a_journal_of_an_earlier_version_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"variant": "baseline", "repeat": 1, "file": "old.kvrun", "seconds": 31.4}\n')
    (tmp_path / "old.kvrun").touch()
    journal, both = files(path, Measured()), sides("a")
    experiment(both, 1, journal.measure, kept=journal.kept)
    assert [run.name for side in both for run in side.runs] == ["old.kvrun", "1.kvrun"]
    assert journal.seconds == [31.4]


def test_a_run_file_that_is_gone_is_made_again(tmp_path: Path) -> None:
    path, measured = tmp_path / "a.jsonl", Measured()
    experiment(sides(), 2, files(path, measured).measure)
    (tmp_path / "1.kvrun").unlink()
    journal, again = files(path, measured), sides()
    experiment(again, 2, journal.measure, kept=journal.kept)
    assert [run.name for run in again[0].runs] == ["2.kvrun", "3.kvrun"]


@pytest.mark.parametrize("text", ["mine\n", '{"mine": 1}\n', "mine", '["variant"]'])
def test_a_file_of_somebody_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="not a journal that kvtune wrote"):
        files(path, Measured())
    assert path.read_text() == text
