"""Equal figures: which trial is taken and why, and which knobs a recipe does without."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvtune.answers.tune.objective import OBJECTIVES
from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.simplify import simplify
from kvtune.answers.tune.sweep import result
from kvtune.answers.tune.ties import best, finalists
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.trials.run import Answer, PlannedTrial, Trials
from kvtune.lab.setup.setup import Load, Setup
from tests.answers.tune.trials.answering import answered

HITS = OBJECTIVES["hit-rate"]
BENCH = Setup(model="m", load=Load(spec="rounds", seed=0, hash="h"), vllm="0.32.0", core="kvtune")


def summary(hits: float, ttft: float = 10.0) -> dict[str, Any]:
    engine = {"block_size": 32, "settings": {"max_num_seqs": 128}}
    return {
        "prefix_cache": {"hit_rate": hits},
        "ttft_ms": {"mean": ttft},
        "engine": engine,
        "core": {"active": True},
    }


def trial(number: int, hits: float, ttft: float = 10.0, **settings: Any) -> Trial:
    return Trial(number=number, settings=settings, on="sim", summary=summary(hits, ttft))


STOCK = Trial(number=0, settings={}, on="sim", core="stock", role="baseline", summary=summary(0.3))


def grid(rates: dict[tuple[int, int], float]) -> list[Trial]:
    points = product((0, 1024, 2048), (1, 16, 64))
    return [
        STOCK,
        *(
            trial(number, rates.get((pin, drop), 0.6), pin_window=pin, min_drop=drop)
            for number, (pin, drop) in enumerate(points, start=1)
        ),
    ]


def test_equal_trials_go_to_the_one_nearest_to_the_defaults() -> None:
    """By default a window is not pinned by a fixed size (0), and must lose 16 blocks."""
    found = result(grid({(0, 64): 0.1}), HITS)
    assert found.best is not None and found.best.settings == {"pin_window": 0, "min_drop": 16}
    assert found.notes == (), "which of eight equal ones it is changes nothing for the reader"


def test_then_to_the_fewest_knobs() -> None:
    trials = [STOCK, trial(1, 0.6, slack=64, min_drop=16), trial(2, 0.6, slack=64)]
    found = best(trials, HITS)
    assert found is not None and found.number == 2


def test_then_to_the_one_whose_neighbours_do_best() -> None:
    """All change both knobs: (2048, 64) has good neighbours, (1024, 1) bad ones."""
    bad = {(0, 1): 0.1, (0, 16): 0.1, (0, 64): 0.5, (1024, 16): 0.1, (2048, 16): 0.5}
    found = best(grid(bad | {(1024, 64): 0.5, (2048, 1): 0.2}), HITS)
    assert found is not None and found.settings == {"pin_window": 2048, "min_drop": 64}


def test_vllms_own_values_are_defaults_too() -> None:
    trials = [
        STOCK,
        trial(1, 0.6, block_size=64),
        trial(2, 0.6, block_size=32),
        trial(3, 0.6, max_num_seqs=8),
    ]
    found = best(trials, HITS)
    assert found is not None and found.number == 2


def test_a_better_or_clearly_faster_trial_is_no_tie() -> None:
    better = best([STOCK, trial(1, 0.6, slack=0), trial(2, 0.601, slack=2048)], HITS)
    assert better is not None and better.number == 2
    faster = best([STOCK, trial(1, 0.6, 10.0, slack=0), trial(2, 0.6, 9.0, slack=2048)], HITS)
    assert faster is not None and faster.number == 2
    about = best([STOCK, trial(1, 0.6, 10.0), trial(2, 0.6, 9.95, slack=2048)], HITS)
    assert about is not None and about.number == 1


def test_a_time_measured_once_breaks_no_tie() -> None:
    from msgspec import structs

    once = [
        structs.replace(t, on="engine") for t in (STOCK, trial(1, 0.6, 10.0), trial(2, 0.6, 3.0, slack=2048))
    ]
    found = best(once, HITS)
    assert found is not None and found.number == 1


def test_finalists_have_different_figures_and_fewest_changes() -> None:
    trials = [STOCK, trial(1, 0.6, slack=512, windows=8), trial(2, 0.6, slack=512), trial(3, 0.5)]
    assert [t.number for t in finalists(trials, HITS, 2)] == [2, 3]


@dataclass
class Replays:
    """Blocks of 64 alone hit 60 %. `needed`: a knob without which the engine does not start."""

    needed: str = ""
    asked: list[PlannedTrial] = field(default_factory=list)

    def answer(self, trials: Trials, plan: PlannedTrial) -> Answer:
        if self.needed and self.needed not in plan.settings:
            return Answer(why="no room")
        return Answer(summary=summary(0.6 if plan.settings.get("block_size") == 64 else 0.3))


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Replays:
    made = Replays()
    made.asked = answered(monkeypatch, made.answer)
    return made


@pytest.fixture
def journal(tmp_path: Path) -> StudyJournal:
    return StudyJournal(tmp_path / "a.jsonl", "tune", BENCH)


def test_knobs_that_change_nothing_are_left_out_of_what_is_confirmed(
    journal: StudyJournal, replays: Replays
) -> None:
    full = trial(
        7,
        0.6,
        block_size=64,
        pin_window=1024,
        slack=64,
        min_drop=16,
        policy="tiered",
        prefix_cache_retention_interval=512,
    )
    said: list[str] = []
    with journal:
        for each in (STOCK, full):
            journal.add(each)
        (found,) = simplify(BENCH, [full], HITS, journal, said.append)
        assert found.trial.settings == {"block_size": 64}
        assert set(found.dropped) == full.settings.keys() - {"block_size"}
        assert found.trial in journal.trials and found.trial.number > 7
        assert said[0] == "without min_drop: the same, left out", "defaults go first"
        assert len(replays.asked) == 6
        assert simplify(BENCH, [full], HITS, journal, said.append) == [found]
        assert len(replays.asked) == 6, "replays are kept in the journal"


def test_a_knob_without_which_the_replay_fails_stays(journal: StudyJournal, replays: Replays) -> None:
    full = trial(7, 0.6, block_size=64, windows=2, slack=64)
    replays.needed = "windows"
    with journal:
        journal.add(full)
        (found,) = simplify(BENCH, [full], HITS, journal, lambda text: None)
    assert found.trial.settings == {"block_size": 64, "windows": 2} and found.dropped == ("slack",)


def test_the_defaults_have_nothing_to_leave_out(journal: StudyJournal, replays: Replays) -> None:
    with journal:
        (found,) = simplify(BENCH, [trial(1, 0.6)], HITS, journal, lambda text: None)
    assert found.dropped == () and not replays.asked
