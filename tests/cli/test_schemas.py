"""Every command with `--json` has a schema that `kvtune schema` prints, and what it prints holds to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, ValidationError

from bench.doc_tables import commands
from kvtune.cli.schema import schema_of, schemas
from tests.simulator import run, validator

GOLDEN = Path(__file__).parents[1] / "golden"
RUN = str(GOLDEN / "schema1-kvtune.kvrun")
REAL = str(GOLDEN / "schema1-real.kvrun")
LOAD = "rounds:prefixes=2,prefix=64,suffix=16,output=4,rounds=2"
ASKED = [
    ["runs", str(GOLDEN), "--json"],
    ["recipe", "list", "--json"],
    ["recipe", "show", "tiny-gemma3-cpu", "--json"],
    ["bounds", "-w", LOAD, "--tier", "1x", "--json"],
    ["compare", RUN, REAL, "--anyway", "--json"],
]
"""Of commands whose tests ask for `--json` nowhere else. `run` (tests/simulator.py) checks what they print."""
TUNE = ["tune", "tiny-llama", "-w", LOAD, "--on", "sim", "--trials", "3", "-o", "out", "--json"]
TUNE += ["--", "--max-model-len", "512", "--num-gpu-blocks-override", "200"]


def test_every_command_with_json_has_a_schema() -> None:
    with_json = {name for name, c in commands() if any("--json" in p.opts for p in c.params)}
    assert with_json == set(schemas())
    for name in schemas():
        Draft202012Validator.check_schema(schema_of(name))


@pytest.mark.parametrize(
    "words",
    [*ASKED, pytest.param(TUNE, marks=[pytest.mark.vllm, pytest.mark.full])],
    ids=lambda words: " ".join(words[:2]),
)
def test_an_answer_holds_to_its_schema(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)


def test_an_answer_that_does_not_hold_fails_the_test_that_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    validator.cache_clear()
    monkeypatch.setattr("tests.simulator.schema_of", lambda command: {"required": ["what is not there"]})
    with pytest.raises(ValidationError, match="what is not there"):
        run(["recipe", "list", "--json"])
    validator.cache_clear()


@pytest.mark.parametrize("command", schemas())
def test_a_schema_refuses_what_is_not_its_commands_answer(command: str) -> None:
    held = Draft202012Validator(schema_of(command))
    assert not held.is_valid({}) and not held.is_valid([]) and not held.is_valid({"error": "no"})


def test_a_schema_is_printed_and_a_wrong_name_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", "recipe", "list"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["title"] == "kvtune recipe list --json"
    assert run(["schema", "profil"]) == 2
    assert "did you mean profile?" in capsys.readouterr().err
