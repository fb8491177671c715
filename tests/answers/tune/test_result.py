"""The result object that pages are drawn from: its fields, the Pareto front, and that it is written whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from kvtune import __version__
from kvtune.answers.tune import sweep
from kvtune.answers.tune.effects import LEFT_OUT, around
from kvtune.answers.tune.objective import OBJECTIVES, front
from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.sweep import keep_result, refuse_foreign_outputs, result
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.answers.tune.trials.run import Answer, PlannedTrial, Trials
from kvtune.answers.tune.trials.setup import study_path
from kvtune.answers.tune.tune import simulated_result
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.recipe import About, Recipe, write_recipe
from kvtune.data.run.signature import signature
from kvtune.lab.setup.resolve import TOO_SMALL
from kvtune.lab.setup.setup import Load, Setup
from tests.answers.tune.trials.answering import answered
from tests.golden import studies

FIELDS = {
    "schema",
    "kind",
    "objective",
    "objectives",
    "trials",
    "best",
    "baseline",
    "finalists",
    "pareto",
    "verdict",
    "recipe",
    "notes",
}


BOTH = (OBJECTIVES["hit-rate"], OBJECTIVES["ttft"])


def trial(number: int, hits: float, ttft: float, rate: float = 1.0) -> Trial:
    summary = {"prefix_cache": {"hit_rate": hits}, "ttft_ms": {"mean": ttft}, "throughput_tok_s": rate}
    return Trial(number=number, settings={"slack": number}, on="sim", summary=summary)


def test_the_front_is_what_nothing_beats() -> None:
    trials = [trial(0, 0.5, 10), trial(1, 0.6, 12), trial(2, 0.5, 11), trial(3, 0.6, 12), trial(4, 0.1, 99)]
    # Trial 3 has the figures of trial 1: the first stands for both.
    assert [t.number for t in front(trials, BOTH)] == [0, 1]


def test_a_failed_trial_is_on_no_front() -> None:
    failed = Trial(number=0, settings={}, on="sim", state="failed")
    assert front([failed], BOTH) == []


def test_sweep_and_tune_have_the_same_fields(tmp_path: Path) -> None:
    by = OBJECTIVES["hit-rate"]
    swept = result([trial(0, 0.5, 10)], by)
    assert set(swept.to_json()) == FIELDS
    with StudyJournal(tmp_path / "a.jsonl", "tune", studies.bench()) as journal:
        journal.add(trial(0, 0.5, 10))
        tuned = simulated_result(journal, by, None, None, "no winner: nothing beat stock in simulation")
    assert set(tuned.to_json()) == FIELDS
    assert swept.pareto == tuned.pareto == (0,)


def test_a_verdict_keeps_its_fields_in_json() -> None:
    """A sweep's verdict has the figures of one run each; a search's has what the engine's runs showed."""
    swept = result([trial(0, 0.5, 10)], OBJECTIVES["hit-rate"]).verdict
    assert set(msgspec.to_builtins(swept)) == {
        *("winner", "confirmed", "objective", "on", "best", "baseline", "text")
    }
    assert set(msgspec.to_builtins(result([], OBJECTIVES["hit-rate"]).verdict)) == {
        *("winner", "confirmed", "objective", "on", "text")
    }


def test_only_where_no_trial_hit_anything_a_note_says_what_to_look_at() -> None:
    """A value of a knob with which nothing hits is in the table: a note on it changes nothing for the reader."""
    trials = [trial(0, 0.5, 10), trial(1, 0.0, 10), trial(2, 0.0, 12), trial(3, 0.2, 9)]
    assert result(trials, OBJECTIVES["ttft"]).notes == ()
    (note,) = result(trials[1:3], OBJECTIVES["ttft"]).notes
    assert note.startswith("nothing hit with any") and "kvtune bounds" in note
    assert result([trials[0], trials[3]], OBJECTIVES["ttft"]).notes == ()


@pytest.mark.parametrize("why", [f"{TOO_SMALL} 30,592 tokens", "two ranks are not known"])
def test_a_sweep_ends_at_a_baseline_that_is_refused(
    why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = KvtuneError(why, "--max-model-len 30592")
    asked = answered(monkeypatch, lambda trials, plan: Answer(why=why, error=error))
    planned = sweep.planned_trials(studies.bench(), [{"slack": 1}, {"slack": 2}, {"slack": 3}])
    with StudyJournal(tmp_path / "a.jsonl", "sweep", studies.bench()) as journal:
        with pytest.raises(KvtuneError, match=why) as refused:
            sweep.run(studies.bench().replayed(), planned, journal, lambda trial: None)
        assert list(journal.trials) == [] and refused.value.hint == "--max-model-len 30592"
    assert asked == planned[:1]


def test_where_nothing_hits_the_pool_that_hits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    least = 1700

    def answer(trials: Trials, plan: PlannedTrial) -> Answer:
        blocks = plan.settings["num_gpu_blocks_override"]
        assert isinstance(blocks, int)
        return Answer({"prefix_cache": {"hit_rate": 0.25 if blocks >= least else 0.0}})

    asked = answered(monkeypatch, answer)
    none = structs.replace(trial(0, 0.0, 10), on="sim")
    none = structs.replace(none, summary={**none.summary, "engine": {"num_blocks": 1200}})
    said = sweep.pool_that_hits(studies.bench(), [none])
    assert "has 1,200 blocks; with 1,800 the defaults of the kvtune core hit 25.0 %" in said
    least = 10**6
    assert "in a pool of 8 times its 1,200 blocks" in sweep.pool_that_hits(studies.bench(), [none])
    hit = structs.replace(none, summary=trial(1, 0.5, 10).summary)
    asked.clear()
    assert sweep.pool_that_hits(studies.bench(), [none, hit]) == "" and asked == []


def test_a_knobs_effect_is_read_from_trials_that_differ_in_it_alone() -> None:
    figures = {(0, 0): 0.1, (0, 1): 0.2, (1, 0): 0.3, (1, 1): 0.9, (2, 0): 0.0, (2, 1): 0.8}

    def at(number: int, hits: float, **settings: int) -> Trial:
        return structs.replace(trial(number, hits, 10), settings=settings)

    trials = [at(n, f, slack=s, pin_window=p) for n, ((s, p), f) in enumerate(figures.items())]
    trials.append(at(9, 0.5, slack=1))
    effects = around(trials[3], trials, OBJECTIVES["hit-rate"])
    assert {e.knob: {v: mean for v, mean, _ in e.means} for e in effects} == {
        "slack": {1: 0.9, 0: 0.2, 2: 0.8},
        "pin_window": {1: 0.9, 0: 0.3, LEFT_OUT: 0.5},
    }
    assert around(trials[0], [trials[0], trials[3]], OBJECTIVES["hit-rate"]) == []


def foreign(path: Path) -> None:
    path.write_text('{"kvtune": "mine"}')


def of_another_study(path: Path) -> None:
    keep_result({}, path.with_name("a.jsonl"), "study 2")


def a_link(path: Path) -> None:
    (path.parent / "kept").write_text(f"kvtune {__version__}, study 1")
    path.symlink_to("kept")


@pytest.mark.parametrize("lay", [foreign, of_another_study, a_link])
def test_only_what_the_study_wrote_itself_is_replaced(tmp_path: Path, lay: Callable[[Path], None]) -> None:
    """With --force every file; a link and its target stay even then."""
    path, journal = tmp_path / "a.result.json", tmp_path / "a.jsonl"
    keep_result({"n": 1}, journal, "study 1")
    keep_result({"n": 2}, journal, "study 1")
    path.unlink()
    lay(path)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    for name in ("a.html", "a.result.json", "a.toml"):
        laid = path.rename(path.with_name(name))
        with pytest.raises(
            UsageError, match=rf"{name}(: it is a link| exists, and kvtune did not write it for this study)"
        ):
            refuse_foreign_outputs(journal, tmp_path / "a.toml", "study 1", force=False)
        laid.rename(path)
    with pytest.raises(UsageError, match=r"did not write it|it is a link"):
        keep_result({"n": 3}, journal, "study 1")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    if path.is_symlink():
        with pytest.raises(UsageError, match="it is a link"):
            keep_result({"n": 3}, journal, "study 1", force=True)
        return
    refuse_foreign_outputs(journal, None, "study 1", force=True)
    keep_result({"n": 3}, journal, "study 1", force=True)
    assert json.loads(path.read_text())["n"] == 3
    assert {n: (tmp_path / n).read_bytes() for n in before if n != path.name} == {
        n: data for n, data in before.items() if n != path.name
    }


def test_a_recipe_that_was_changed_by_hand_is_not_overwritten(tmp_path: Path) -> None:
    path, of = tmp_path / "a.toml", "study 1"
    about = About(model="m", device="cpu", vllm="0.32.0", kvtune="0.1.0", status="simulated")
    write_recipe(Recipe(recipe=about), path, signature(of))
    refuse_foreign_outputs(tmp_path / "a.jsonl", path, of, force=False)
    path.write_text(path.read_text().replace('"simulated"', '"hand-written"'))
    with pytest.raises(UsageError, match="was changed"):
        refuse_foreign_outputs(tmp_path / "a.jsonl", path, of, force=False)


@pytest.mark.parametrize("ending", [".jsonl", ".html", ".result.json", ".toml"])
def test_a_new_study_takes_a_name_of_which_nothing_is_there(tmp_path: Path, ending: str) -> None:
    bench = Setup(model="m", load=Load(spec="rounds:prefixes=2", seed=0, hash="0"), core="kvtune")
    first = study_path("", tmp_path / "new", "tune", bench)
    assert first.name == "m_rounds_tune.jsonl"
    (tmp_path / f"m_rounds_tune{ending}").symlink_to("nowhere")
    assert study_path("", tmp_path, "tune", bench).name == "m_rounds_tune-2.jsonl"
