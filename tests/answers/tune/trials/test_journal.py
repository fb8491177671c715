"""Journals of studies: what survives a crash, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.answers.tune.result import Trial, study_identity
from kvtune.answers.tune.study import read_study
from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.platforms import DEVICES
from kvtune.lab.setup.setup import Load, Real, Setup

BENCH = Setup(model="m", load=Load(spec="rounds", seed=0, hash="abc"), vllm="0.32.0", core="kvtune")


def trial(number: int) -> Trial:
    return Trial(number=number, settings={"slack": number}, on="sim", summary={"wall_s": 1.0})


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.jsonl"
    with StudyJournal(path, "sweep", BENCH) as journal:
        journal.add(trial(0))
        journal.add(trial(1))
    with StudyJournal(path, "sweep", BENCH) as journal:
        assert journal.trials == [trial(0), trial(1)]


FIRST = (
    '{"kvtune_journal":1,"kind":"sweep","bench":{"model":"m","spec":"rounds","seed":0,"workload_hash":"abc",'
    '"core":"kvtune","core_settings":{"slack":64},"engine_args":["--block-size","32"],"block_tokens":32,'
    '"dummy":false,"vllm":"0.32.0","slo":{"ttft":500.0},"engine_on":"model","like_device":"h100"}}\n'
)
"""The first line of a journal as the first version wrote it."""


def test_a_journal_of_the_first_version_is_read_and_written_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(FIRST)
    setup = read_study(path).setup
    assert setup.platform == DEVICES["h100"] and setup.load.slo == {"ttft": 500.0}
    assert (setup.pool.block_tokens, setup.device) == (32, Real())
    assert study_identity("sweep", setup) == "study 68fe44b6e23bd1c2"
    with StudyJournal(path, "sweep", setup) as journal:
        journal.add(trial(0))
    with StudyJournal(tmp_path / "b.jsonl", "sweep", setup):
        pass
    assert path.read_text().startswith(FIRST) and (tmp_path / "b.jsonl").read_text() == FIRST


@pytest.mark.parametrize(
    "change", [{"engine_on": "moon"}, {"seed": "x"}, {"core": "other"}, {"like_device": "x"}]
)
def test_a_journal_whose_setup_is_not_one_is_refused(tmp_path: Path, change: dict[str, str]) -> None:
    head = json.loads(FIRST)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({**head, "bench": {**head["bench"], **change}}) + "\n")
    with pytest.raises(UsageError):
        read_study(path)


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
    other = Setup.of_file({**BENCH.filed(), field: "other"})
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
