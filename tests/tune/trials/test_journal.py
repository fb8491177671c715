"""Journals of studies: what survives a crash, what is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.analysis.study import Bench, Trial
from kvtune.errors import KvtuneError, UsageError
from kvtune.tune.trials.journal import StudyJournal

BENCH = Bench(model="m", spec="rounds", seed=0, workload_hash="abc", vllm="0.32.0")


def trial(number: int) -> Trial:
    return Trial(number=number, settings={"slack": number}, on="sim", summary={"wall_s": 1.0})


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    with StudyJournal(path, "sweep", BENCH) as journal:
        journal.add(trial(0))
        journal.add(trial(1))
    with StudyJournal(path, "sweep", BENCH) as journal:
        assert journal.trials == [trial(0), trial(1)]


@settings(deadline=None)  # it waits for a disk
@given(cut=st.integers(0, 400))
def test_a_crash_at_any_byte_loses_at_most_the_running_trial(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("j") / "a.jsonl"
    with StudyJournal(path, "sweep", BENCH) as journal:
        for number in range(3):
            journal.add(trial(number))
    whole = path.read_bytes()
    kept = whole[: max(0, len(whole) - cut)]
    path.write_bytes(kept)
    complete = max(0, kept.count(b"\n") - 1)
    with StudyJournal(path, "sweep", BENCH) as journal:
        assert len(journal.trials) == complete
        journal.add(trial(9))
    with StudyJournal(path, "sweep", BENCH) as journal:
        assert [t.number for t in journal.trials] == [*range(complete), 9]


@pytest.mark.parametrize("field", ["model", "workload_hash", "vllm", "spec"])
def test_a_journal_of_another_study_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "a.jsonl"
    with StudyJournal(path, "sweep", BENCH):
        pass
    other = msgspec.structs.replace(BENCH, **{field: "other"})
    with pytest.raises(UsageError, match=field), StudyJournal(path, "sweep", other):
        pass


def test_a_journal_of_another_command_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with StudyJournal(path, "sweep", BENCH):
        pass
    with pytest.raises(UsageError, match="kvtune sweep"), StudyJournal(path, "tune", BENCH):
        pass


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with (
        StudyJournal(path, "sweep", BENCH),
        pytest.raises(UsageError, match="in use"),
        StudyJournal(path, "sweep", BENCH),
    ):
        pass
    with StudyJournal(path, "sweep", BENCH) as again:
        assert again.trials == []


@pytest.mark.parametrize(
    "text",
    [
        "hello\n",
        "{}\n",
        '{"kvtune_journal":"x"}\n',
        '{"one": "line without an end"}',
        "three\nlines\nwithout an end",
        '{"kvtune_journal":1,"kind":"sweep","bench":{}}\nmine',
        '{"kvtune_j"',
    ],
)
def test_another_file_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="not a journal"), StudyJournal(path, "sweep", BENCH):
        pass
    assert path.read_text() == text


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with StudyJournal(path, "sweep", BENCH) as journal:
        journal.add(trial(0))
    path.write_text(path.read_text() + "garbage\n")
    with pytest.raises(UsageError, match="line 3"), StudyJournal(path, "sweep", BENCH):
        pass


def test_a_full_disk_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with StudyJournal(path, "sweep", BENCH) as journal:
        journal.add(trial(0))
        monkeypatch.setattr("os.fsync", full)
        with pytest.raises(KvtuneError, match="No space") as refused:
            journal.add(trial(1))
    assert "1 trials are kept" in refused.value.hint


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_refused_and_what_it_names_left_alone(tmp_path: Path, there: bool) -> None:
    kept, link = tmp_path / "kept.jsonl", tmp_path / "a.jsonl"
    if there:
        with StudyJournal(kept, "sweep", BENCH) as journal:
            journal.add(trial(0))
        kept.write_bytes(kept.read_bytes() + b"mine")
    before = kept.read_bytes() if there else None
    link.symlink_to(kept)
    with pytest.raises(UsageError, match="it is a link"), StudyJournal(link, "sweep", BENCH):
        pass
    assert kept.exists() == there and (not there or kept.read_bytes() == before)
