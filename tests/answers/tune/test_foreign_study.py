"""A study of someone else: no file that it names elsewhere is opened, and every damage is one line."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvtune.answers.tune.study import SavedResult, read_study, recipe_of
from kvtune.base.errors import UsageError
from tests.golden import studies


def journal(folder: Path, run_file: str) -> Path:
    study = studies.tuned_study()
    trials = tuple(msgspec.structs.replace(trial, run_file=run_file) for trial in study.trials)
    path = folder / "s.jsonl"
    path.write_bytes(studies.journal(studies.Study(study.kind, study.setup, trials)))
    return path


def test_a_recipe_elsewhere_is_not_put_into_the_page(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "secret").write_text("password")
    (tmp_path / "study").mkdir()
    path = journal(tmp_path / "study", "")
    for named in (str(tmp_path / "mine" / "secret"), "../mine/secret", "/etc/passwd", "\0"):
        assert recipe_of(path, SavedResult(trials=(), recipe=named)) is None
    (path.parent / "secret").write_text("of the study")
    assert recipe_of(path, SavedResult(trials=(), recipe="/elsewhere/secret")) == path.parent / "secret"


@pytest.mark.parametrize("named", ["/etc/passwd", "../a.kvrun", "pipe"])
def test_run_files_elsewhere_are_not_read(tmp_path: Path, named: str) -> None:
    path = journal(tmp_path, named)
    assert {Path(trial.run_file).parent for trial in read_study(path).trials} == {tmp_path}
    assert {trial.run_file for trial in read_study(path, own=True).trials} == {named}


def test_a_run_file_below_the_journal_is_read_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a.kvrun").write_bytes(b"")
    path = journal(tmp_path, str(tmp_path / "runs" / "a.kvrun"))
    assert {trial.run_file for trial in read_study(path).trials} == {str(tmp_path / "runs" / "a.kvrun")}


@pytest.mark.parametrize("pool", ["3,00", "-3", "0", "x", "9" * 30])
def test_a_pool_that_is_no_number_is_named(pool: str) -> None:
    bench = studies.bench(engine_args=["--num-gpu-blocks-override", pool])
    with pytest.raises(UsageError, match="--num-gpu-blocks-override"):
        bench.with_knobs({"block_size": 64})
