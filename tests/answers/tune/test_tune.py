"""A search from start to recipe, with stand-ins for engine and simulator: what is asked of whom, in which order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtune.answers.tune import tune as tuning
from kvtune.answers.tune.confirm import Contender
from kvtune.answers.tune.objective import OBJECTIVES
from kvtune.answers.tune.result import StudyResult, Trial
from kvtune.answers.tune.search import SearchSettings
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.data.knobs import ModelFacts
from kvtune.data.run.file import read_run
from kvtune.lab.setup.setup import Load, Real, Setup

RECORDED = Path(__file__).parents[2] / "golden" / "schema1-real.kvrun"


class Quiet:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def __call__(self, trial: Trial) -> None: ...

    def phase(self, text: str) -> None:
        self.phases.append(text)


def searched(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    flags: list[str],
    guards: tuple[str, ...] = (),
    join: bool = False,
) -> tuple[Setup, Quiet, list[Setup]]:
    """What a search is given after the baseline's run, the phases, and what guards were checked with."""
    given: list[Setup] = []
    checked: list[Setup] = []

    class Bout:
        def __init__(self, *_: Any) -> None: ...

        def run(self, sides: Sequence[Contender], rounds: int) -> None:
            sides[0].runs.append(read_run(RECORDED))

    def search(*arguments: Any) -> list[Trial]:
        given.append(next(each for each in arguments if isinstance(each, Setup)))
        return []

    def check(setup: Setup, specs: object, lab: object) -> None:
        checked.append(setup)

    monkeypatch.setattr(tuning, "Bout", Bout)
    monkeypatch.setattr(tuning, "search", search)
    monkeypatch.setattr(tuning, "_space", lambda settings: {})
    monkeypatch.setattr(tuning.guard, "check", check)
    monkeypatch.setattr(tuning.guard, "holding", lambda bench, specs, trials, *more: list(trials))
    bench = Setup(model="m", load=Load(spec="rounds", seed=0, hash="h"), engine_args=flags, core="kvtune")
    progress = Quiet()
    with StudyJournal(folder / "study.jsonl", "tune", bench) as journal:
        settings = tuning.TuneSettings(
            setup=bench,
            facts=ModelFacts(),
            by=OBJECTIVES["hit-rate"],
            output=folder,
            recipe=folder / "recipe.toml",
            search=SearchSettings(join=join),
            guards=guards,
        )
        result = tuning.tune(settings, journal, progress)
    assert isinstance(result, StudyResult) and not result.verdict.winner
    return given[0], progress, checked


def test_the_search_simulates_the_engine_of_the_baselines_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    replayed, _, _ = searched(monkeypatch, tmp_path, [])
    engine = read_run(RECORDED).header.engine
    assert engine.num_blocks
    assert replayed.engine_args == ["--num-gpu-blocks-override", str(engine.num_blocks)]
    sim = replayed.simulated
    assert (replayed.pool.block_tokens, sim.async_scheduling) == (engine.block_size, engine.async_scheduling)
    given = Setup(model="m", engine_args=["--kv-cache-memory-bytes", "1G"])
    assert given.as_ran(read_run(RECORDED)).engine_args == given.engine_args


def test_guards_wait_for_the_run_that_says_how_large_the_pool_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    like, progress, checked = searched(monkeypatch, tmp_path, [], guards=("chat",))
    assert checked == [like] and progress.phases.index("stock on the engine") == 0
    (tmp_path / "given").mkdir()
    flags = ["--num-gpu-blocks-override", "900"]
    _, progress, checked = searched(monkeypatch, tmp_path / "given", flags, guards=("chat",))
    assert [each.device for each in checked] == [Real()] and progress.phases.index("stock on the guards") == 0


def test_a_worker_that_joined_leaves_the_guards_to_the_one_that_began(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It has not run stock, so it does not know the pool in which guards would be replayed."""
    _, progress, checked = searched(monkeypatch, tmp_path, [], guards=("chat",), join=True)
    assert checked == [] and "guards in simulation" not in progress.phases
