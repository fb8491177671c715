"""The result object that pages are drawn from: its fields, the Pareto front, and that it is written whole."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from kvtune.analysis.study import Trial
from kvtune.errors import KvtuneError
from kvtune.tune.objective import OBJECTIVES, front
from kvtune.tune.sweep import keep_result, result
from kvtune.tune.trials.journal import StudyJournal
from kvtune.tune.tune import simulated_result
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
    "tier_curves",
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
        *("winner", "confirmed", "objective", "on", "best", "baseline", "text"),
    }
    assert set(msgspec.to_builtins(result([], OBJECTIVES["hit-rate"]).verdict)) == {
        *("winner", "confirmed", "objective", "on", "text"),
    }


def test_values_with_which_nothing_hits_are_noted() -> None:
    """A column of zeros is remarked on, unless every trial has zero."""
    trials = [trial(0, 0.5, 10), trial(1, 0.0, 10), trial(2, 0.0, 12), trial(3, 0.2, 9)]
    (note,) = result(trials, OBJECTIVES["ttft"]).notes
    assert note.startswith("nothing hit with slack=1, 2: ") and "kvtune explain" in note
    (note,) = result(trials[1:3], OBJECTIVES["ttft"]).notes
    assert note.startswith("nothing hit with any") and "kvtune bounds" in note
    assert result([trials[0], trials[3]], OBJECTIVES["ttft"]).notes == ()


def test_a_value_that_was_tried_once_is_not_blamed() -> None:
    """In a search its trial differs in other knobs, too."""

    def tried(number: int, slack: int, pin: int, hits: float) -> Trial:
        made = trial(number, hits, 10)
        return structs.replace(made, settings={"slack": slack, "pin_window": pin})

    trials = [tried(0, 0, 0, 0.5), tried(1, 64, 8, 0.0), tried(2, 0, 1, 0.4), tried(3, 0, 2, 0.4)]
    assert not any("nothing hit" in note for note in result(trials, OBJECTIVES["ttft"]).notes)
    trials += [tried(4, 64, 4, 0.0), tried(5, 64, 5, 0.0)]
    (note,) = (n for n in result(trials, OBJECTIVES["ttft"]).notes if "nothing hit" in n)
    assert note.startswith("nothing hit with slack=64: ")


def test_it_is_written_whole_beside_the_journal(tmp_path: Path) -> None:
    path = keep_result({"schema": 1}, tmp_path / "a_tune.jsonl")
    assert path.name == "a_tune.result.json"
    assert json.loads(path.read_text()) == {"schema": 1}
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_full_disk_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = keep_result({"schema": 1}, tmp_path / "a.jsonl")

    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(KvtuneError, match="No space") as refused:
        keep_result({"schema": 2}, tmp_path / "a.jsonl")
    assert "a.jsonl" in refused.value.hint
    assert json.loads(path.read_text()) == {"schema": 1}
