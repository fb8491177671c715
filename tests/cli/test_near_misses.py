"""Names that are nearly right: what is suggested, by command line, before any engine starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulator import run


@pytest.mark.parametrize(
    ("line", "suggested"),
    [
        ("profile tiny-gemma", "tiny-gemma3"),
        ("profile tiny-gemma --on sim", "tiny-gemma3"),
        ("sweep tiny-gema3 --pin -w rounds", "tiny-gemma3"),
        ("bounds -w rounds --model tiny-gemma", "tiny-gemma3"),
        ("profle tiny-opt", "profile"),
        ("recipe shw x", "show"),
        ("profile tiny-opt -w ruonds", "rounds"),
        ("profile tiny-opt -w rounds:prefxes=3", "prefixes"),
        ("profile tiny-opt --set core.pin_windw=3", "pin_window"),
        ("sweep tiny-opt --set pin_windw=3 -w rounds", "pin_window"),
        ("profile tiny-opt --probe ligt", "light"),
        ("profile tiny-opt --core kvtun", "kvtune"),
        ("profile tiny-opt --stcks", "--stacks"),
        ("recipe show tiny-gemma3-cp", "tiny-gemma3-cpu"),
    ],
)
def test_a_near_miss_is_answered_with_the_name_that_is_meant(
    line: str,
    suggested: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(line.split()) == 2
    said = capsys.readouterr().err
    assert suggested in said and "[Errno" not in said
    if not suggested.startswith("--"):  # click words its options' own way
        assert f"did you mean '{suggested}'" in said.lower() or f"did you mean {suggested}?" in said.lower()


@pytest.mark.parametrize(
    "line",
    [
        "explain {folder}",
        "compare {folder} {folder}",
        "report {folder}",
        "export {folder} --csv",
        "profile tiny-opt --on sim --like {folder}",
        "profile tiny-opt --recipe {folder}",
        "recipe show {folder}",
    ],
)
def test_a_folder_given_for_a_file_is_called_a_folder(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(line.format(folder=tmp_path).split()) == 2
    what, next_ = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in what and ("is a folder" in what or "Is a directory" in what)
    assert "Errno" not in what and next_.startswith("  next: ")


def test_names_that_are_near_nothing_get_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bounds", "-w", "rounds", "--model", "zzz"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("line", ["explain-log x.jsonl -o {}", "record http://127.0.0.1:1 -o {}"])
def test_a_run_file_is_not_written_under_a_pages_name(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line.format("out.html").split()) == 2
    assert "kvtune report R.kvrun -o out.html" in capsys.readouterr().err
