"""Tuning for the ceiling, which no replay has: the front end's knobs beside stock, with a stand-in for the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtune.answers.tune import confirm
from kvtune.answers.tune import study as studies
from kvtune.answers.tune import tune as tuning
from kvtune.answers.tune.confirm import Contender
from kvtune.answers.tune.document import words
from kvtune.answers.tune.objective import objective
from kvtune.answers.tune.result import Settings, StudyResult, Trial
from kvtune.answers.tune.search import SearchSettings
from kvtune.answers.tune.study import read_study
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.trials.run import Answer, PlannedTrial, Trials
from kvtune.base.errors import KvtuneError
from kvtune.data.knobs import ModelFacts
from kvtune.data.recipe import read_recipe
from kvtune.data.run.extras import Extras
from kvtune.data.run.types import EngineInfo
from kvtune.lab.device.settings import Timed, nominal
from kvtune.lab.setup.setup import Load, Real, Setup
from kvtune.reading.analysis.comparison.compare import Comparison, repeated, value_at
from kvtune.reading.analysis.comparison.measures import MEASURES
from tests.answers.tune.trials.answering import answered
from tests.reading.report.drawn import study_page

TOKENS_S = {"stock": 40_000.0, 1: 100_000.0, 4: 300_000.0, 16: 900_000.0}
"""The ceiling by stream interval."""


TTFT_MS: dict[int, float] = {}
"""By the number of the trial, where a test says so; else 10."""


def compared(a: Sequence[Any], b: Sequence[Any]) -> Comparison:
    """The comparison over summaries instead of runs."""
    figures = []
    for measure in MEASURES:
        if measure.path in ("ceiling.tokens_s", "ttft_ms.mean"):
            one, two = ([float(value_at(run.summary, measure.path) or 0) for run in runs] for runs in (a, b))
            figures.append(repeated(measure, one, two, ""))
    return Comparison((), tuple(figures))


class Quiet:
    def __call__(self, trial: Trial) -> None: ...

    def phase(self, text: str) -> None:
        assert "simulation" not in text


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings that the engine was started with, without stock's."""
    made: list[Settings] = []
    runs: dict[str, Any] = {}

    def answer(trials: Trials, plan: PlannedTrial) -> Answer:
        bench, number = trials.setup, len(trials.made)
        made.extend([] if plan.stock else [plan.settings])
        tokens_s = TOKENS_S["stock" if plan.stock else int(plan.settings.get("stream_interval", 1))]
        summary = {"engine": {"device": "timed"}, "ttft_ms": {"mean": TTFT_MS.get(number, 10.0)}}
        if isinstance(bench.device, Timed):
            summary["ceiling"] = {"tokens_s": tokens_s * (1.0 + 0.01 * (number % 3))}
        engine = EngineInfo(vllm="1", device="timed", num_blocks=8, block_size=16, async_scheduling=True)
        header = SimpleNamespace(engine=engine, extra=Extras())
        runs[str(number)] = SimpleNamespace(summary=summary, header=header)
        return Answer(summary, run_file=str(number))

    answered(monkeypatch, answer)
    monkeypatch.setattr(confirm, "read_run", lambda file: runs[str(file)])
    monkeypatch.setattr(confirm, "compare_repeats", compared)
    return made


def tuned(
    folder: Path,
    flags: Sequence[str] = (),
    on: Any = "host",
    gc: bool = False,
) -> StudyResult:
    bench = Setup(
        model="m",
        load=Load(spec="rounds", seed=0, hash="h"),
        engine_args=list(flags),
        device=nominal() if on == "host" else Real(),
        vllm="1",
        core="kvtune",
    )
    with StudyJournal(folder / "study.jsonl", "tune", bench) as journal:
        settings = tuning.TuneSettings(
            setup=bench,
            facts=ModelFacts(),
            by=objective("ceiling,ttft"),
            output=folder,
            recipe=folder / "recipe.toml",
            search=SearchSettings(),
            collector=gc,
        )
        return tuning.tune(settings, journal, Quiet())


def test_the_interval_with_the_highest_ceiling_becomes_a_recipe(
    tmp_path: Path, tried: list[Settings]
) -> None:
    result = tuned(tmp_path)
    assert {settings["stream_interval"] for settings in tried} == {1, 4, 16}
    assert result.verdict.confirmed and result.best is not None
    assert result.best.settings == {"stream_interval": 16}
    recipe = read_recipe(tmp_path / "recipe.toml")
    assert recipe.engine == {"stream_interval": 16} and recipe.recipe.device == "timed"
    figure = recipe.evidence["figures"]["ceiling_tokens_s"]
    assert figure["verdict"] == "better" and figure["recipe"] > figure["baseline"]


def test_an_interval_that_a_flag_sets_is_not_searched(tmp_path: Path, tried: list[Settings]) -> None:
    result = tuned(tmp_path, ["--stream-interval", "4"])
    assert tried and not any(tried)
    assert result.verdict.confirmed, "the core alone raises the ceiling"


def test_the_collectors_settings_are_tried_where_they_are_asked_for(
    tmp_path: Path, tried: list[Settings]
) -> None:
    tuned(tmp_path, gc=True)
    assert all(settings in tried for settings in tuning.COLLECTOR)


def test_an_engine_whose_runs_have_no_ceiling_is_refused_after_its_first(
    tmp_path: Path, tried: list[Settings]
) -> None:
    with pytest.raises(KvtuneError, match="no ceiling") as caught:
        tuned(tmp_path, on="model")
    assert "--on host" in caught.value.hint and not tried


def test_a_machine_that_got_faster_meanwhile_does_not_hide_a_higher_ceiling(
    tmp_path: Path, tried: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ceiling is CPU time. Stock's first run waited for a busy machine: its first tokens came late."""
    monkeypatch.setitem(TTFT_MS, 0, 10_000.0)
    result = tuned(tmp_path)
    assert result.verdict.drift_ttft is not None and result.verdict.drift_ttft < -0.99
    assert result.verdict.confirmed, result.verdict.text


def test_the_page_of_a_search_names_the_winner_and_not_its_best_single_run(
    tmp_path: Path, tried: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run of an interval of 4 was by chance better than any of the winner's."""
    result = tuned(tmp_path)
    study = read_study(tmp_path / "study.jsonl")
    lucky = next(t for t in study.trials if t.settings == {"stream_interval": 4})
    lucky.summary["ceiling"]["tokens_s"] = 950_000.0

    def read_runs(side: Contender) -> None:
        side.runs.extend(SimpleNamespace(summary=t.summary) for t in side.trials)  # type: ignore[misc]

    monkeypatch.setattr(studies, "_read_runs", read_runs)
    shown = studies.view(study, objective("ceiling"), tmp_path / "recipe.toml")
    assert shown.result.best is not None and shown.result.best.settings == {"stream_interval": 16}
    assert shown.result.verdict.confirmed and result.verdict.confirmed
    assert (
        "with 95 % confidence" in shown.result.verdict.text
        and "not repeated" not in shown.result.verdict.text
    )
    assert words(shown)[2] == "kvtune recipe verify recipe.toml"
    assert "kvtune serve" not in study_page(shown), "no server runs on a simulated device"
