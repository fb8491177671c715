"""The page of a sweep or a search: from a study file to one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtune.answers.tune.document import study_sections
from kvtune.answers.tune.document import words as advice
from kvtune.answers.tune.objective import objective
from kvtune.answers.tune.result import StudyView
from kvtune.answers.tune.rows import settings_text
from kvtune.answers.tune.study import is_study, read_study, saved_result, view
from kvtune.answers.tune.sweep import keep_result
from kvtune.base.units import span
from tests.golden import studies
from tests.golden.make import FOLDER
from tests.reading.report.drawn import study_page, words
from tests.simulator import run

GOLDEN = sorted(FOLDER.glob("study*.jsonl"))


def sections(study: StudyView) -> dict[str, Any]:
    return {s.id: s for s in study_sections(study) if s is not None}


def with_result(study: StudyView, **changes: Any) -> StudyView:
    return msgspec.structs.replace(study, result=msgspec.structs.replace(study.result, **changes))


def test_a_heat_map_for_each_block_size() -> None:
    made = sections(studies.viewed(studies.grid_study()))
    maps = made["maps"].charts
    assert [c.title for c in maps] == ["block_size 32", "block_size 64"]
    assert len(made["maps"].data[maps[0].id]["figure"]) == 8, "one trial failed"
    assert "best 41.76, at pin_window 2048 and min_drop 64" in maps[0].label
    assert len(made["maps"].data[maps[1].id]["figure"]) == 9
    assert {c.title for c in made["effects"].charts} == {"pin_window", "min_drop", "block_size"}
    assert made["effects"].charts[0].title == "pin_window"


@pytest.mark.parametrize("pins", [(0, 1024, 2048), (1024, 0, 512, 2048)])
def test_of_settings_that_tie_one_is_the_best_everywhere(pins: tuple[int, ...]) -> None:
    """All but those with the first pin window hit 100 %, and one failed; the default of min_drop is 16."""
    study = studies.viewed(studies.grid_study(pins=pins, gain=9.0))
    best = study.result.best
    assert best is not None and best.settings["min_drop"] == 16
    made, number = sections(study), 6 * len(pins)
    setting = settings_text(best)
    assert f"{number - 7} of {number} settings tie" in advice(study)[0]
    assert advice(study)[0].startswith(setting) and made["outcome"].tiles[0].more == setting
    row = [cell.text for cell in made["results"].tables[0].rows[0]]
    assert row[2:5] == [str(best.settings[knob]) for knob in ("pin_window", "min_drop", "block_size")]
    framed = [
        (data["x"][place], data["y"][place])
        for data in (made["maps"].data[chart.id] for chart in made["maps"].charts)
        for place, at in enumerate(data["best"])
        if at
    ]
    assert framed == [(str(best.settings["pin_window"]), "16")]


def test_the_objective_stands_before_the_settings() -> None:
    """A narrow page shows what decides without scrolling."""
    made = sections(studies.viewed(studies.grid_study()))
    for section in ("results", "trials"):
        assert [column.head for column in made[section].tables[0].columns[:2]] == ["trial", "hit rate (%)"]


def test_an_interval_without_width_is_one_figure() -> None:
    assert span("+32.7 points", "+32.7 points") == "+32.7 points"
    assert span("+32.6 points", "+32.7 points") == "+32.6 points to +32.7 points"


def test_what_a_knob_did_is_drawn_only_where_nothing_else_differs() -> None:
    shown = studies.viewed(studies.grid_study())
    made = sections(shown)["effects"]
    assert "one knob changed at a time" in made.lead
    assert {chart.title for chart in made.charts} == {effect.knob for effect in shown.effects} != set()
    alone = sections(msgspec.structs.replace(shown, effects=()))["effects"]
    assert not alone.charts and "no trial differs from the best one in one knob alone" in alone.lead
    on_engine = [msgspec.structs.replace(t, on="engine") for t in shown.result.trials]
    measured = with_result(msgspec.structs.replace(shown, drawn_on="engine"), trials=tuple(on_engine))
    drawn = sections(measured)["effects"]
    assert not drawn.charts and drawn.lead.startswith("Not drawn: one engine run")
    assert "Not drawn" in study_page(measured)


def test_a_winner_in_simulation_is_named_and_the_command_confirms_it_on_the_engine() -> None:
    html = words(study_page(studies.viewed(studies.grid_study())))
    assert "Simulated." in html
    assert "hit rate 41.8 %, against 33.0 % with stock vLLM, in simulation." in html
    assert "kvtune tune tiny-gemma3" in html
    assert "No recipe was written" in html


def test_values_with_which_nothing_hits_are_noticed() -> None:
    shown = studies.viewed(studies.grid_study())
    assert "Nothing hit" not in study_page(shown)
    html = study_page(with_result(shown, notes=("nothing hit with pin_window=4096: look",)))
    assert "Nothing hit with pin_window=4096: look." in html


def test_what_a_study_without_a_winner_says() -> None:
    html = words(study_page(studies.viewed(studies.grid_study(stock=0.9))))
    assert "No winner" in html and "Nothing tried here was shown to be better than stock vLLM" in html
    html = study_page(studies.viewed(studies.grid_study(fails=range(1, 100))))
    assert "Every trial failed." in html and "kvtune doctor tiny-gemma3" in words(html)
    html = words(study_page(view(studies.Study("sweep", studies.bench(), ()), studies.HIT_RATE)))
    assert "No trial was completed" in html
    assert "first token (ms)" in study_page(view(studies.grid_study(), objective("ttft")))


def test_finalists_on_the_engine_without_their_run_files_keep_their_figures() -> None:
    shown = studies.viewed(studies.tuned_study())
    assert [row.core for row in shown.engine_runs] == ["stock", "kvtune"]
    assert [len(row.values) for row in shown.engine_runs] == [3, 3]
    assert shown.engine_runs[1].mean == pytest.approx(0.61)
    assert [row.why for row in shown.engine_runs] == ["the baseline", "its run files are gone"]
    html = study_page(shown)
    assert "Finalists on the engine" in html
    assert "No winner" in html, "nothing is called a winner without its intervals"


def test_intervals_outlive_the_run_files_in_the_saved_result(tmp_path: Path) -> None:
    study = studies.tuned_study()
    path = tmp_path / "s.jsonl"
    path.write_bytes(studies.journal(study))
    by = studies.HIT_RATE
    best = study.trials[-1].settings
    figure = {"path": by.path, "a": 0.33, "b": 0.61, "difference": 0.28, "relative": 0.85}
    figure |= {"low": 0.25, "high": 0.31, "verdict": "better", "why": ""}
    stored = {
        "objective": by.name,
        "trials": [{"number": t.number} for t in study.trials],
        "finalists": [{"settings": best, "figures": [figure]}],
        "verdict": {"winner": True, "drift_ttft": 0.01},
    }
    assert saved_result(path, study) is None
    keep_result(stored, path, "study 1")
    shown = view(study, by, saved=saved_result(path, study))
    figure_again = shown.engine_runs[1].figure
    assert shown.result.verdict.winner and figure_again is not None and figure_again.low == 0.25
    html = study_page(shown)
    assert "+25.0 points to +31.0 points" in html and "No winner" not in html
    assert not view(study, objective("ttft"), saved=saved_result(path, study)).result.verdict.winner
    more = studies.Study(
        study.kind,
        study.setup,
        (*study.trials, study.trials[-1].__class__(number=999, settings={}, on="sim")),
    )
    assert saved_result(path, more) is None, "trials came after it"


def test_the_best_setting_keeps_the_pools_size_in_tokens() -> None:
    study = studies.grid_study(blocks=(64,), fails=())
    shown = studies.viewed(study)
    assert "--num-gpu-blocks-override 1500" in " ".join(shown.best_flags)
    assert "--num-gpu-blocks-override 1500" in words(study_page(shown))


@pytest.mark.full
def test_a_thousand_trials_stay_below_three_megabytes() -> None:
    study = studies.thousand()
    assert len(study.trials) == 1001
    html = study_page(studies.viewed(study))
    assert len(html.encode()) < 3_000_000
    assert "Of 5 block sizes" not in html


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_report_draws_every_golden_study(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert is_study(path)
    assert run(["report", str(path), "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert "tiny-gemma3" in text
    assert run(["report", str(path), "-o", str(page)]) == 2, "an existing page is kept"
    assert "--force" in capsys.readouterr().err
    assert run(["report", str(path), "--console"]) == 0
    assert "hit rate" in capsys.readouterr().out


def test_a_real_sweep_of_the_simulator_is_drawn_whole() -> None:
    """48 settings of tiny-gemma3 on a pool of 3000 blocks, as `kvtune sweep` left them."""
    shown = view(read_study(FOLDER / "study1-real.jsonl"), studies.HIT_RATE)
    made = {s.id: s for s in study_sections(shown) if s is not None}
    assert made["outcome"].title == "Ahead in simulation"
    assert [c.title for c in made["maps"].charts] == ["block_size 32", "block_size 64"]
    assert [len(made["maps"].data[c.id]["figure"]) for c in made["maps"].charts] == [12, 12]
    assert {c.title for c in made["effects"].charts} == {"pin_window", "min_drop", "block_size", "policy"}
    assert len(made["trials"].tables[0].rows) == 49, "and stock"
    assert shown.result.best is not None and shown.result.best.settings["policy"] == "tiered"


def test_a_study_that_is_still_written_is_read_up_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(studies.journal(studies.grid_study())[:-20])
    assert len(read_study(path).trials) == len(studies.grid_study().trials) - 1
