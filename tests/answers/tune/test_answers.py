"""A winner is served once, and its hits are checked: a toy server answers in its place. Wrong hits win nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from kvtune.answers.tune import tune as tuning
from kvtune.answers.tune.answers import checked
from kvtune.answers.tune.confirm import Confirmed, Contender
from kvtune.answers.tune.objective import OBJECTIVES
from kvtune.answers.tune.result import Settings, Trial
from kvtune.answers.tune.search import SearchSettings
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.data.knobs import ModelFacts
from kvtune.lab.engine.experiment import BASELINE
from kvtune.lab.engine.profile import EngineBench
from kvtune.lab.setup.setup import Load, Setup
from kvtune.reading.analysis.comparison.compare import Figure
from tests.answers.check.fake import Toy, serving
from tests.answers.tune.test_tune import Quiet
from tests.clocks import Skipping

FIGURES = (Figure(OBJECTIVES["hit-rate"].path, 0.1, 0.2, 0.1, 1.0, 0.05, 0.15, "better"),)
SIDES: list[tuple[str, Settings]] = [(BASELINE, {}), ("trial", {"slack": 64})]
SETUP = Setup(model="tiny-opt", engine_args=["--load-format", "auto"])


class Toys(EngineBench):
    """Serves `toy`; None: a server that ends at once."""

    toy: Toy | None = None

    @contextmanager
    def serve(self, setup: Setup) -> Iterator[tuple[str, Callable[[], str]]]:
        if self.toy is None:
            yield "http://127.0.0.1:9", lambda: "out of memory"
            return
        with serving(self.toy) as url:
            yield url, str


def toys(toy: Toy | None) -> Toys:
    made = type("Made", (Toys,), {"toy": toy})
    return cast("Toys", made())


def test_hits_of_a_winners_server_are_told_as_cold_or_wrong() -> None:
    wrong, told = checked(SETUP, toys(Toy()), Skipping())
    assert not wrong and told.startswith("check of the best setting: hits: ") and "answer as cold" in told
    wrong, told = checked(SETUP, toys(Toy(wrong=lambda hit: hit.cached > 100)), Skipping())
    assert wrong and "hits differ from the cold answer" in told
    wrong, told = checked(SETUP, toys(Toy(wrong=lambda hit: hit.cached % 64 != 0)), Skipping())
    assert not wrong and "hits differ from the cold answer" in told, "it may be rounding"


def test_a_server_that_does_not_start_decides_nothing_and_random_weights_are_not_served() -> None:
    wrong, told = checked(SETUP, toys(None), Skipping())
    assert (
        not wrong
        and told == "hits of the best setting were not checked: its server did not start: out of memory"
    )
    assert checked(Setup(model="tiny-opt"), toys(None), Skipping()) == (False, "")


@pytest.mark.parametrize("wrong", [False, True])
def test_a_setting_whose_hits_are_wrong_is_no_winner(
    wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Setup] = []
    kept: list[Any] = []

    def checked(setup: Setup, *_: object) -> tuple[bool, str]:
        asked.append(setup)
        return wrong, "as told"

    monkeypatch.setattr(tuning, "checked", checked)
    monkeypatch.setattr(tuning, "recipe_of", lambda *_: "a recipe")
    monkeypatch.setattr(tuning, "_keep", lambda recipe, _: kept.append(recipe))
    stock, best = (
        Contender(
            name, settings, trials=[Trial(number=number, settings=settings, on="engine", core="kvtune")]
        )
        for number, (name, settings) in enumerate(SIDES)
    )
    setup = Setup(model="tiny-opt", core="kvtune", load=Load(spec="rounds", seed=0, hash="h"))
    settings = tuning.TuneSettings(
        setup=setup,
        facts=ModelFacts(),
        by=OBJECTIVES["hit-rate"],
        output=tmp_path,
        recipe=tmp_path / "recipe.toml",
        search=SearchSettings(),
    )
    confirmed = Confirmed(stock, (best,), best, best, FIGURES, None, "better")
    why: list[str] = []
    with StudyJournal(tmp_path / "study.jsonl", "tune", setup) as journal:
        result = tuning._engine_result(settings, journal, confirmed, Quiet(), why)
    assert [each.core_settings for each in asked] == [{"slack": 64}]
    assert (kept, result.recipe is None) == ([] if wrong else ["a recipe"], wrong)
    assert [each.winner for each in result.finalists] == [result.verdict.winner] == [not wrong]
    assert (result.verdict.text == "no winner: as told", why) == (wrong, [] if wrong else ["as told"])
