"""Guards: a setting that is best for one workload is no finalist if it hurts another."""

from __future__ import annotations

from typing import Any

import pytest

from kvtune.answers.tune import guard
from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.trials.run import Answer, PlannedTrial, Trials
from kvtune.base.errors import UsageError
from kvtune.lab.setup.setup import Load, Setup
from tests.answers.tune.trials.answering import answered
from tests.simulator import run as cli

BENCH = Setup(model="m", load=Load(spec="rounds", seed=0, hash="h"), vllm="0.32.0", core="kvtune")
CHAT, ZIPF = "chat:sessions=2", "zipf:requests=4"
RATES: dict[str, dict[int, float]] = {
    # by slack; 0 is the core's defaults, -1 stock
    "chat": {-1: 0.50, 0: 0.495, 64: 0.20, 128: 0.60, 256: 0.4899},
    "zipf": {-1: 0.30, 0: 0.30, 64: 0.90, 128: 0.29, 256: 0.10},
}


@pytest.fixture(autouse=True)
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last trial that is handed in ends first."""

    def answer(trials: Trials, plan: PlannedTrial) -> Answer:
        rates = RATES[trials.setup.load.spec.partition(":")[0]]
        slack = -1 if plan.stock else int(plan.settings.get("slack", 0))
        if slack not in rates:
            return Answer(why="no room")
        return Answer(summary={"core": {"active": True}, "prefix_cache": {"hit_rate": rates[slack]}})

    answered(monkeypatch, answer, backwards=True)


def trial(number: int, **settings: Any) -> Trial:
    return Trial(number=number, settings=settings, on="sim", summary={})


DEFAULTS = trial(1)
TUNED = [trial(2, slack=64), trial(3, slack=128), trial(4, slack=256)]


def kept(*guards: str, of: list[Trial] | None = None) -> list[int]:
    said: list[str] = []
    held = guard.holding(BENCH, guards, of or [*TUNED, DEFAULTS], said.append)
    assert len(said) <= len(guards)
    return [t.number for t in held]


def test_only_what_holds_on_every_guard_is_left_in_its_order() -> None:
    assert kept() == [2, 3, 4, 1]
    assert kept(CHAT) == [3, 1]  # the last one is more than a point below
    assert kept(ZIPF) == [2, 3, 1]
    assert kept(CHAT, ZIPF) == kept(ZIPF, CHAT) == [3, 1]


def test_no_guard_is_replayed_once_no_candidate_holds() -> None:
    assert kept(CHAT, ZIPF, of=TUNED[:1]) == []


def test_a_setting_that_cannot_run_on_a_guard_does_not_hold() -> None:
    assert kept(CHAT, of=[trial(9, slack=32), DEFAULTS]) == [1]


def test_a_guard_that_stock_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    guard.check(BENCH, (ZIPF, CHAT))  # stock runs both
    monkeypatch.setitem(RATES, "chat", {})
    with pytest.raises(UsageError, match="stock cannot run the guard chat"):
        guard.check(BENCH, (ZIPF, CHAT))
    with pytest.raises(UsageError, match="stock cannot run the guard chat"):
        kept(CHAT)


def test_the_cores_defaults_are_always_candidates() -> None:
    baseline = Trial(number=0, settings={}, on="sim", role="baseline", core="stock")
    assert guard.candidates(TUNED, [baseline, DEFAULTS, *TUNED]) == [*TUNED, DEFAULTS]
    assert guard.candidates([DEFAULTS], [DEFAULTS]) == [DEFAULTS]
    many = [trial(n, slack=n) for n in range(2, 40)]
    assert guard.candidates(many, [DEFAULTS, *many]) == [*many[: guard.TRIED], DEFAULTS]


def test_a_guard_that_is_no_workload_is_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("vllm")
    assert cli(["tune", "tiny-llama", "-w", "rounds", "--guard", "no-such-load"]) == 2
    assert "no-such-load" in capsys.readouterr().err
