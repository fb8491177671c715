"""`kvtune diff` on what is wrong: one line and a next step, the rest is compared. Versions that a script plays."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from kvtune.answers.diff.answers import Figures, ModelReply, OfVersion
from kvtune.base.dialogue import framed
from tests.scripts import script
from tests.simulator import run


def figures(block: int) -> Figures:
    return Figures(
        gpus=1,
        groups=["1 x 12 full attention"],
        block=block,
        hit_unit=block,
        hits=[96.0, 96.0],
        pool_tokens=100_000,
        idle_tokens=100_000,
        concurrency=10.0,
        prefix_caching=True,
        retention="0",
        chunk=8192,
        seats=1024,
    )


def version_that_answers(folder: Path, version: str, *models: ModelReply) -> str:
    """An environment whose Python gives these answers to whatever it is asked."""
    replies = [OfVersion(version=version), *models]
    answers = folder.with_suffix(".answers")
    answers.parent.mkdir(exist_ok=True)
    answers.write_bytes(b"".join(piece for reply in replies for piece in framed(reply)))
    script(folder / "bin" / "python", f'cat {answers} > "/proc/self/fd/$3"')  # -m MODULE PIPE
    return str(folder)


@pytest.fixture
def sides(tmp_path: Path) -> list[str]:
    """Two versions that know tiny-llama; one does not know the other model."""
    refused = ModelReply(model="new-one", missed=["ValueError: no architecture NewForCausalLM"])
    llama = [ModelReply(model="tiny-llama", figures=figures(block)) for block in (16, 32)]
    return [
        version_that_answers(tmp_path / "old", "0.31.0", llama[0], refused),
        version_that_answers(
            tmp_path / "new", "0.32.0", llama[1], ModelReply(model="new-one", figures=figures(16))
        ),
    ]


def test_an_environment_without_vllm_is_one_line_and_a_next_step(
    tmp_path: Path, sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    script(tmp_path / "bare" / "bin" / "python", f'exec {sys.executable} -I -S "$@"')
    assert run(["diff", sides[0], str(tmp_path / "bare"), "tiny-llama"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2].startswith(f"kvtune: {tmp_path}/bare answers nothing: ")
    assert lines[-1] == "  next: give an environment that has vLLM"


def test_an_environment_that_has_everything_but_vllm_is_another(
    tmp_path: Path, sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bare = version_that_answers(tmp_path / "bare", "")
    assert run(["diff", sides[0], bare, "tiny-llama"]) == 2
    assert f"{bare} answers nothing: it has no vLLM" in capsys.readouterr().err


def test_a_model_that_one_version_does_not_know_is_one_line_and_the_others_are_compared(
    tmp_path: Path, sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    models = tmp_path / "models"
    models.write_text("tiny-llama\nnew-one\n")
    assert run(["diff", *sides, "--models", str(models), "--json"]) == 0
    known, unknown = json.loads(capsys.readouterr().out)["models"]
    assert known["differs"] == {"block": [16, 32], "hit_unit": [16, 32]}
    assert unknown["failed"] == ["old: ValueError: no architecture NewForCausalLM"]
    assert run(["diff", *sides, "--models", str(models), "--fail-on", "unknown > 0"]) == 1


LOGS = {
    "missing": "requests:path={folder}/none.jsonl",
    "not a log": "requests:path={folder}/broken.jsonl",
    "texts for a model without a tokenizer": "requests:path={folder}/texts.jsonl",
    "no such load": "roundz",
}


@pytest.mark.parametrize("log", LOGS)
def test_a_log_that_cannot_be_replayed_is_one_line_and_the_model_is_compared(
    log: str, tmp_path: Path, sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "texts.jsonl").write_text(json.dumps({"model": "other", "prompt": "a text"}) + "\n")
    load = LOGS[log].format(folder=tmp_path)
    assert run(["diff", *sides, "tiny-llama", "-w", load, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["models"][0]["differs"] == {"block": [16, 32], "hit_unit": [16, 32]}
    (why,) = answer["load"]["failed"]
    assert "\n" not in why and len(why) > 20 and answer["load"]["old"] is None


def test_a_limit_of_a_load_that_could_not_be_replayed_is_no_success(
    sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What is known is printed all the same."""
    words = ["diff", *sides, "tiny-llama", "-w", "roundz", "--fail-on", "hits < -2 points"]
    assert run([*words, "--md"]) == 3
    told = capsys.readouterr()
    assert "blocks of 32 tokens instead of 16" in told.out and "no value for hits" in told.err


def test_a_file_without_models_is_refused(
    tmp_path: Path, sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models").write_text("\n")
    assert run(["diff", *sides, "--models", str(tmp_path / "models")]) == 2
    assert "names no model" in capsys.readouterr().err


def test_the_python_of_a_folder_is_named_before_it_runs(
    sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diff", *sides, "tiny-llama"]) == 0
    first, second = capsys.readouterr().err.splitlines()[:2]
    assert [first, second] == [f"running the Python of {side}, as you .." for side in sides]


@pytest.mark.parametrize("model", ["tiny-lama", "empty", "file", "./none", "qwen3-nxt-80b"])
def test_a_model_that_is_none_ends_the_command_before_a_version_is_asked(
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sides: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert run(["diff", *sides, model]) == 2
    told = capsys.readouterr()
    assert told.out == "" and model in told.err.splitlines()[0]


def test_models_of_which_no_version_answers_are_no_success(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that a version takes and the other does not is an answer, its reason first."""
    models = tmp_path / "models"
    models.write_text("tiny-lama\nnone\n")
    silent = [version_that_answers(tmp_path / version, version) for version in ("0.31.0", "0.32.0")]
    assert run(["diff", *silent, "--models", str(models), "--json"]) == 2
    told = capsys.readouterr()
    assert told.out == "" and "tiny-lama: both: the process that asks vLLM ended" in told.err
    models.write_text("new-one\n")
    refused = ModelReply(model="new-one", missed=["ValueError: no architecture NewForCausalLM"])
    sides = [
        version_that_answers(tmp_path / "other", "0.31.0", refused),
        version_that_answers(tmp_path / "newer", "0.32.0", ModelReply(model="new-one", figures=figures(16))),
    ]
    assert run(["diff", *sides, "--models", str(models)]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("new-one cannot be compared: old: ValueError")


@pytest.mark.parametrize("names", [("0.32", "0.32.0"), ("0.34.1", "0.34.1"), ("{side}", "{side}/../old")])
def test_one_vllm_of_two_names_differs_in_nothing_and_nobody_is_asked(
    names: tuple[str, str], sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["diff", *(name.format(side=sides[0]) for name in names), "tiny-llama"]) == 0
    told = capsys.readouterr()
    assert "nothing can differ" in " ".join(told.out.split()) and told.err == ""
    assert run(["diff", "0.32", "0.32.0", "tiny-llama", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"".join(b"m%d\n" % n for n in range(50_000)), "names 50,000 models; 100 are asked about at most"),
        (b"\x00\x1b[31m\n" * 9, "is the name of no model"),
        (b"x" * 5000, "is the name of no model"),
        (None, "models: not a regular file"),
    ],
)
def test_a_list_of_models_has_a_length(
    tmp_path: Path, sides: list[str], capsys: pytest.CaptureFixture[str], content: bytes | None, says: str
) -> None:
    if content is None:
        os.mkfifo(tmp_path / "models")
    else:
        (tmp_path / "models").write_bytes(content)
    assert run(["diff", *sides, "--models", str(tmp_path / "models")]) == 2
    err = capsys.readouterr().err
    assert says in err and "\x1b" not in err and len(err) < 400


@pytest.mark.parametrize("named", ["~nosuchuser6/x", "a\0b", "x/" * 5000])
def test_a_name_that_can_be_no_folder_is_refused(named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", named, "0.32.0", "tiny-llama"]) == 2
    assert "is no version of vLLM" in capsys.readouterr().err
