"""Every command with `--json` has a schema that `kvtune schema` prints, and what it prints holds to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from kvtune.cli.schema import schema_of, schemas
from tests.simulator import run
from tests.tools.doc_tables import commands
from tests.watch.played import Answers, http
from tests.watch.recordings import recorded

GOLDEN = Path(__file__).parents[1] / "golden"
RUN = str(GOLDEN / "schema1-kvtune.kvrun")
REAL = str(GOLDEN / "schema1-real.kvrun")
LOAD = "rounds:prefixes=2,prefix=64,suffix=16,output=4,rounds=2"
AGENTS = "agents:context=100,tools=20,output=8,turns=3,different=6,hours=0.02,think=3"
POOL = ("--", "--max-model-len", "512", "--num-gpu-blocks-override", "200")
LOG = '{"prompt": [1, 2, 3, 4], "answer": [5], "t0": 1.0, "t1": 2.0}\n'
HERE: dict[str, list[list[str]]] = {
    "runs": [["runs", str(GOLDEN), "--json"]],
    "recipe list": [["recipe", "list", "--json"]],
    "recipe show": [["recipe", "show", "tiny-gemma3-cpu", "--json"]],
    "bounds": [["bounds", "-w", LOAD, "--json"], ["bounds", "-w", LOAD, "--tier", "1x", "--json"]],
    "trace": [["trace", "-w", LOAD, "--json"], ["trace", "-w", "agents:sessions=2,hours=0.1", "--json"]],
    "compare": [["compare", RUN, REAL, "--anyway", "--json"], ["compare", RUN, RUN, "--json"]],
    "doctor": [["doctor", "tiny-llama", "--json"], ["doctor", "--json"]],
    "explain-log": [["explain-log", "log.jsonl", "--bounds-only", "--json"]],
}
WITH_VLLM: dict[str, list[list[str]]] = {
    "profile": [
        ["profile", "tiny-llama", "-w", LOAD, "--on", "sim", "--tries", "1", "-o", "out", "--json", *POOL]
    ],
    "capacity": [
        [
            "capacity",
            "tiny-llama",
            "-w",
            AGENTS,
            "--sessions",
            "3",
            "--seeds",
            "1",
            "--no-remedies",
            "--json",
            *POOL,
        ]
    ],
    "sweep": [
        ["sweep", "tiny-llama", "-w", LOAD, "--on", "sim", "--block-size", "-o", "out", "--json", *POOL]
    ],
    "tune": [
        ["tune", "tiny-llama", "-w", LOAD, "--on", "sim", "--trials", "3", "-o", "out", "--json", *POOL]
    ],
}
OTHERS = {"watch", "tap", "explain", "recipe verify"}
"""Tested below, or with the tests of the command itself."""


def check(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert run(words) in (0, 1, 3), capsys.readouterr().err
    answer = json.loads(capsys.readouterr().out)
    Draft202012Validator(schema_of(command)).validate(answer)
    return answer


def test_every_command_with_json_has_a_schema() -> None:
    with_json = {name for name, c in commands() if any("--json" in p.opts for p in c.params)}
    assert with_json == set(schemas()) == {*HERE, *WITH_VLLM, *OTHERS}
    for name in schemas():
        Draft202012Validator.check_schema(schema_of(name))


@pytest.mark.parametrize(
    ("command", "words"), [(name, words) for name, all_ in HERE.items() for words in all_]
)
def test_an_answer_holds_to_its_schema(
    command: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("log.jsonl").write_text(LOG)
    check(command, words, capsys)


@pytest.mark.parametrize("command", schemas())
def test_a_schema_refuses_what_is_not_its_commands_answer(command: str) -> None:
    held = Draft202012Validator(schema_of(command))
    assert not held.is_valid({}) and not held.is_valid([]) and not held.is_valid({"error": "no"})


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param(name, words, marks=[pytest.mark.full] if name == "capacity" else [])
        for name, all_ in WITH_VLLM.items()
        for words in all_
    ],
)
def test_a_simulated_answer_holds_to_its_schema(
    command: str,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    check(command, words, capsys)


def test_a_servers_snapshot_holds_to_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    with http(Answers(recorded("full_attention").metrics)) as base:
        check("watch", ["watch", base, "--once", "--seconds", "0.2", "--json"], capsys)


def test_a_schema_is_printed_and_a_wrong_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "recipe", "list"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["title"] == "kvtune recipe list --json"
    assert run(["schema", "profil"]) == 2
    assert "did you mean profile?" in capsys.readouterr().err
