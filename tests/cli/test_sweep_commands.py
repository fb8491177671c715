"""Bad input to sweep, tune, recipe and serve: refused before anything starts, in two lines that name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.answers.tune.trials.journal import StudyJournal
from kvtune.cli.query import declared
from kvtune.cli.recipe import VerifyQuery
from kvtune.cli.tune import TuneQuery
from kvtune.lab.setup.setup import Load, Setup
from tests.simulator import run

pytestmark = pytest.mark.vllm  # the installed vLLM's version is checked first

CASES = [
    (["sweep", "tiny-gemma3", "--set", "slak=3"], "slack"),
    (["sweep", "tiny-gemma3", "--set", "policy=best"], "two_class"),
    (["sweep", "tiny-gemma3", "--set", "block_size=40"], "multiples of 32"),
    (["sweep", "tiny-gemma3", "--gc"], "--on engine"),
    (["sweep", "tiny-gemma3", "--on", "moon"], "--on must be"),
    (["sweep", "tiny-gemma3", "--set", "stream_interval=1,4"], "--on host"),
    (["sweep", "tiny-gemma3", "--objective", "ceiling"], "--on host"),
    (["sweep", "tiny-gemma3", "--set", "api_server_count=1,2"], "knobs: "),
    (["sweep", "tiny-gemma3", "--on", "host", "--", "--api-server-count", "2"], "kvtune watch"),
    (["tune", "tiny-gemma3", "--objective", "ceiling", "--on", "sim"], "no ceiling"),
    (["tune", "tiny-gemma3", "--", "--api-server-count", "1"], "kvtune watch"),
    (
        ["tune", "tiny-gemma3", "--objective", "ttft,ceiling", "--guard", "chat"],
        "--guard is read only with an --objective that a simulation has",
    ),
    (["sweep", "tiny-gemma3", "--objective", "joy"], "hit-rate"),
    (["sweep", "tiny-gemma3", "-w", "rounds:colour=1"], "colour"),
    (["sweep", "no/such/model/at/all"], "no model folder"),
    (["sweep", "tiny-gemma3", "--trace", "none.jsonl"], "none.jsonl"),
    (["tune", "tiny-gemma3", "--join"], "--study URL"),
    (["tune", "tiny-gemma3", "--join", "--study", "sqlite:///x", "--guard", "chat"], "the worker that began"),
    (["tune", "tiny-gemma3", "--on", "engine"], "--on must be"),
    (["tune", "tiny-gemma3", "-w", "zipf", "--trace", "x"], "--trace is not read with --workload"),
    (["recipe", "verify", "nowhere"], "no recipe nowhere"),
    (["recipe", "show", "nowhere"], "recipe list"),
    (["serve", "tiny-gemma3", "--recipe", "nowhere"], "no recipe nowhere"),
    (["serve", "tiny-llama", "--recipe", "tiny-gemma3-cpu"], "for the model tiny-gemma3"),
    (["profile", "tiny-llama", "--recipe", "tiny-gemma3-cpu"], "for the model tiny-gemma3"),
    (["profile", "tiny-gemma3", "--recipe", "nowhere"], "no recipe nowhere"),
]


@pytest.mark.parametrize(
    ("arguments", "says"), CASES, ids=lambda c: " ".join(c) if isinstance(c, list) else ""
)
def test_bad_input(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert len(printed.err.strip().splitlines()) == 2
    assert not any(tmp_path.iterdir())


def test_a_study_of_another_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    with StudyJournal(
        path,
        "sweep",
        Setup(model="tiny-gemma3", load=Load(spec="rounds", seed=0, hash="other"), core="kvtune"),
    ):
        pass
    assert run(["sweep", "tiny-gemma3", "-w", "rounds:prefixes=3", "--study", str(path)]) == 2
    assert "belongs to another study" in capsys.readouterr().err


def test_a_database_that_does_not_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("psycopg", reason="the test extra brings PostgreSQL's driver")
    url = "postgresql://me:hush@127.0.0.1:1/x"
    command = [
        "tune",
        "tiny-gemma3",
        "-w",
        "rounds:prefixes=2,prefix=100",
        "--on",
        "sim",
        "-o",
        str(tmp_path),
    ]
    assert run([*command, "--study", url]) == 1
    printed = capsys.readouterr()
    assert "does not answer" in printed.err and "hush" not in printed.err
    assert printed.out == ""


def test_a_recipe_is_verified_with_as_many_runs_as_it_was_confirmed_with() -> None:
    """Both stop once a difference is shown. With two runs a side, on a busy machine, one of 2.5 times was not."""
    made, verified = (declared(query)["rounds"].default for query in (TuneQuery, VerifyQuery))
    assert made == verified >= 4
