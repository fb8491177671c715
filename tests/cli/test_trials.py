"""What sweep, tune and `recipe show` print: rows, knobs with units and help, the next command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvtune.answers.tune.objective import OBJECTIVES
from kvtune.answers.tune.recipes.shelf import find, load
from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.rows import best_first, folded_rows, terse
from kvtune.answers.tune.study import read_study
from kvtune.cli.views.trials import TrialsView
from kvtune.data.knobs import KNOBS
from kvtune.data.recipe import write_recipe
from tests.cli.terminal import shown
from tests.reading.report.drawn import words
from tests.simulator import run

GOLDEN = Path(__file__).parents[1] / "golden"
STUDY = GOLDEN / "study1-real.jsonl"
RECIPE = "tiny-gemma3-cpu"


def trial(number: int, hit_rate: float, **settings: int | str) -> Trial:
    summary = {"prefix_cache": {"hit_rate": hit_rate}, "ttft_ms": {"mean": 15.0}, "throughput_tok_s": 112.0}
    return Trial(number=number, settings=dict(settings), on="sim", summary=summary)


def test_settings_that_came_to_the_same_are_one_row_and_the_baseline_is_a_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(read_study(STUDY).trials) == 49
    assert run(["report", str(STUDY), "--console"]) == 0
    _, _, results = capsys.readouterr().out.partition("\nResults\n")
    lines = results.split("baseline: stock vLLM")[0].splitlines()
    table = lines[next(at for at, line in enumerate(lines) if line.startswith("trial ")) :]
    rows = [line.split("  ")[0] for line in table[1:] if not line.startswith(" ")]
    assert rows == ["5 and 11 more", "baseline", "2 and 11 more", "25 and 23 more"]
    assert "pin_window=0,512 min_drop=16,1,64" in table[1] and "policy=tiered" in table[2]


def test_a_row_that_is_no_grid_shows_the_settings_of_its_first_trial() -> None:
    trials = [trial(1, 0.5, a=1, b=1), trial(2, 0.5, a=2, b=2), trial(3, 0.4, a=1, b=2)]
    first, second = folded_rows(trials)
    assert (first.name, first.value("a"), first.value("b")) == ("1 and 1 more", "1", "1")
    assert second.name == "3"


def test_where_trials_have_a_ceiling_it_is_a_column_and_tells_them_apart() -> None:
    trials = [trial(n, 0.5, stream_interval=n) for n in (1, 2)]
    assert len(folded_rows(trials)) == 1 and "host ceiling (tok/s)" not in terse(folded_rows(trials)).heads
    for one, tokens_s in zip(trials, (20_000.0, 31_000.0), strict=True):
        one.summary["ceiling"] = {"tokens_s": tokens_s}
    drawn = terse(folded_rows(trials))
    assert [cells[-1].text for cells in drawn.rows] == ["20,000", "31,000"]
    assert drawn.heads[-1] == "host ceiling (tok/s)"


@pytest.mark.parametrize("width", [80, 140])
def test_a_study_on_the_console_has_units_help_and_the_pages_next_command(width: int) -> None:
    code, text = shown("report", str(STUDY), "--console", columns=width)
    assert code == 0
    said = " ".join(text.split())
    assert "pin_window, tokens tokens kept before a point where a hit can end" in said
    assert "block_size, tokens tokens per block" in said
    assert "Simulated. No engine ran: hits are those of replays, times are predictions." in said
    (command,) = re.findall(r"^  (kvtune tune .*)$", text, re.M)
    assert command.rstrip().endswith("--block-size 32") and "…" not in text


def test_the_page_says_what_its_knobs_are(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert run(["report", str(STUDY), "-o", str(page)]) == 0
    text = words(page.read_text())
    assert "<dt>pin_window, tokens</dt><dd>tokens kept before a point where a hit can end" in text


def test_progress_names_a_trial_by_the_number_that_the_table_has(capsys: pytest.CaptureFixture[str]) -> None:
    with TrialsView(3, OBJECTIVES["hit-rate"]) as view:
        view(trial(7, 0.25, slack=512))
        view(Trial(number=4, settings={}, on="sim", core="stock", role="baseline"))
    first, second = capsys.readouterr().err.splitlines()[-2:]
    assert first == "1 of 3: trial 7 on sim, slack=512, hit rate 25.0 %, first token 15 ms, output 112 tok/s"
    assert second.startswith("2 of 3: stock (baseline) on sim")


def test_every_knob_that_counts_something_has_a_unit_and_every_knob_has_help() -> None:
    for knob in KNOBS.values():
        assert knob.help
        counts = knob.kind in ("integer", "number") and knob.name not in ("gpu_memory_utilization",)
        assert bool(knob.unit) is counts, knob.name


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_recipe_show_is_for_people_and_raw_is_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipe", "show", RECIPE]) == 0
    text = capsys.readouterr().out
    said = " ".join(text.split())
    assert "block_size vLLM 32 tokens tokens per block" in said
    assert "Evidence, for this load alone load rounds:prefixes=12,prefix=2000" in said
    assert "prefix cache hit rate 32.0 % 64.1 % +32.0 points" in said
    assert f"\n  kvtune serve tiny-gemma3 --recipe {RECIPE}\n" in text
    assert not re.search(r"\d\.\d{4}", text)
    assert run(["recipe", "show", RECIPE, "--raw"]) == 0
    raw = capsys.readouterr().out
    assert raw == (Path(__file__).parents[2] / "recipes" / f"{RECIPE}.toml").read_text()


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_recipe_show_says_that_a_simulated_one_was_not_confirmed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = load(find("gemma-3-4b-cpu"))
    figures = {"simulated": 0.7251, "simulated_baseline": 0.5842}
    recipe = replace(made, core={"slack": 512}, evidence={**made.evidence, **figures})
    write_recipe(recipe, tmp_path / "made.toml")
    assert run(["recipe", "show", str(tmp_path / "made.toml")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "simulated: no engine has confirmed it" in said
    assert "prefix cache hit rate in simulation 58.4 % with stock vLLM, 72.5 % with the recipe" in said
    assert "slack core 512 tokens (default)" in said


def test_a_trial_that_hits_nothing_is_before_one_that_failed() -> None:
    failed = replace(trial(1, 0.0), summary={}, state="failed", why="no room")
    trials = [failed, trial(2, 0.0, a=1), trial(3, 0.5, a=2)]
    assert [one.number for one in best_first(trials, "hit-rate")] == [3, 2, 1]
