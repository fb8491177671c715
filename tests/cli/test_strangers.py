"""Files from strangers, which ask for code: each command says one line, and starts nothing."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtune.answers.tune.result import Trial
from kvtune.answers.tune.trials.journal import FORMAT, Head, StudyJournal
from kvtune.base.errors import EXIT_FAILED, EXIT_USAGE, KvtuneError, UsageError
from kvtune.data.recipe import read_recipe, to_toml, write_recipe
from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.types import Run
from kvtune.lab.setup.setup import Load, Setup
from tests.simulator import run

GOLDEN = Path(__file__).parents[1] / "golden"

EVIL_CODE = """
from pathlib import Path
Path({mark!r}).write_text("code of a stranger ran")
from transformers import PretrainedConfig
class EvilConfig(PretrainedConfig):
    model_type = "evilopt"
"""


@pytest.fixture
def pwned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that exists once a stranger's code has run; in a folder with a model that has some."""
    monkeypatch.chdir(tmp_path)
    mark, model = tmp_path / "PWNED", tmp_path / "evil"
    model.mkdir()
    config = {
        "architectures": ["OPTForCausalLM"],
        "model_type": "evilopt",
        "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"},
    }
    (model / "config.json").write_text(json.dumps(config))
    for place in (model / "configuration_evil.py", tmp_path / "evil_module.py"):
        place.write_text(EVIL_CODE.format(mark=str(mark)))
    return mark


@pytest.fixture
def still(pwned: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, where a test fails as soon as a process is started."""

    def started(*args: object, **more: object) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr("os.execve", started)
    monkeypatch.setattr("os.posix_spawn", started)
    return pwned


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line (and its hint) that a command said."""
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert not said.out and len(lines) <= 2 and all(line.isprintable() for line in lines), said
    assert lines[0].startswith("kvtune: ") and "unexpected" not in lines[0], said
    return lines[0]


def evil_run(folder: Path, **engine: Any) -> Path:
    recorded = read_run(GOLDEN / "schema1-real.kvrun")
    header = msgspec.structs.replace(
        recorded.header,
        model=str(folder / "evil"),
        engine=msgspec.structs.replace(recorded.header.engine, **engine),
    )
    path = folder / "evil.kvrun"
    write_run(Run(header, recorded.tables), path)
    return path


@pytest.mark.parametrize(
    "command",
    [
        lambda run_file: ["explain", run_file, "--tries", "0"],
        lambda run_file: ["explain", run_file, "--save"],
        lambda run_file: ["explain", run_file, "--model", "tiny-opt"],
        lambda run_file: ["profile", "tiny-gemma3", "--on", "sim", "--like", run_file],
        lambda run_file: ["profile", "tiny-gemma3", "--on", "host", "--like", run_file],
    ],
    ids=["explain", "save", "model", "sim", "host"],
)
def test_a_run_file_whose_flags_ask_for_more_than_is_allowed_is_refused(
    still: Path, capsys: pytest.CaptureFixture[str], command: Callable[[str], list[str]]
) -> None:
    nothing_runs(["--tr"], command, still, capsys)


def nothing_runs(
    flags: list[str], command: Callable[[str], list[str]], still: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = evil_run(still.parent, args=flags)
    before = path.read_bytes()
    assert run(["-q", *command(str(path))]) == EXIT_USAGE
    assert "is not taken from a file" in one_line(capsys)
    assert not still.exists() and path.read_bytes() == before


def test_a_run_file_without_kv_specs_does_not_choose_the_model(
    still: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = evil_run(still.parent, kv_specs={}, args=[])
    assert run(["-q", "explain", str(path)]) == EXIT_USAGE
    said = capsys.readouterr().err
    assert "only named in the file" in said and "--model MODEL" in said and "--trust" in said
    assert not still.exists()


@pytest.mark.parametrize(
    "command",
    [
        lambda run_file: ["report", run_file, "--console"],
        lambda run_file: ["report", run_file, "-o", "page.html"],
        lambda run_file: ["compare", run_file, run_file],
        lambda run_file: ["export", run_file, "--perfetto"],
        lambda run_file: ["export", run_file, "--csv"],
        lambda run_file: ["runs", run_file],
    ],
    ids=["console", "page", "compare", "perfetto", "csv", "runs"],
)
def test_what_only_reads_a_run_file_starts_nothing(still: Path, command: Callable[[str], list[str]]) -> None:
    path = evil_run(still.parent, args=["--tr", "--scheduler-cls", "evil_module.Scheduler"])
    assert run(command(str(path))) == 0
    assert not still.exists()


@pytest.mark.vllm
def test_a_replay_opens_no_model_that_only_the_file_names_and_finds_the_runs_own_hits(
    pwned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    path = evil_run(pwned.parent)
    assert run(["-q", "explain", str(path), "--tries", "0", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    hits = explained["prefix_cache"]["hit_tokens"]
    assert hits == explained["run_hit_tokens"] and not explained["disagreements"]
    assert explained["prefix_cache"]["query_tokens"] > 0
    assert not pwned.exists()


def recipe_file(folder: Path, **changes: Any) -> Path:
    """A recipe by hand, as anyone may write one."""
    fields: dict[str, Any] = {
        "recipe": {"model": "tiny-opt", "device": "cpu", "vllm": "0.32.0", "kvtune": "0.1.0"},
        "engine": {"block_size": 32},
        "evidence": {
            "objective": "hit-rate",
            "workload": "rounds",
            "seed": 0,
            "workload_hash": "h",
            "engine_args": ["--block-size", "32"],
        },
    }
    tables = {name: {**fields[name], **changes.get(name, {})} for name in fields}
    path = folder / "evil.toml"
    path.write_text(to_toml(tables), encoding="utf-8")
    return path


RECIPE_COMMANDS = {
    "show": lambda recipe: ["recipe", "show", recipe],
    "raw": lambda recipe: ["recipe", "show", recipe, "--raw"],
    "verify": lambda recipe: ["recipe", "verify", recipe, "--anyway"],
    "export": lambda recipe: ["recipe", "export", recipe, "-o", "out"],
    "serve": lambda recipe: ["serve", "tiny-opt", "--recipe", recipe, "--anyway"],
    "profile": lambda recipe: ["profile", "tiny-opt", "--recipe", recipe, "--anyway"],
    "profile sim": lambda recipe: ["profile", "tiny-opt", "--recipe", recipe, "--anyway", "--on", "sim"],
}
Command = Callable[[str], list[str]]
every_recipe_command = pytest.mark.parametrize("command", RECIPE_COMMANDS.values(), ids=RECIPE_COMMANDS)


def refused(command: Command, path: Path, names: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.parent.rglob("*"))
    assert run(["-q", *command(str(path))]) == EXIT_USAGE
    said = one_line(capsys)
    assert path.name in said and names in said
    assert sorted(path.parent.rglob("*")) == before, "nothing is written"


@every_recipe_command
@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {"enable_prefix_caching": "--trust-remote-code"}},
        {"recipe": {"vllm": "0.32.0\rtrust-remote-code: true\r#"}},
    ],
    ids=["value", "text"],
)
def test_no_command_takes_a_recipe_that_holds_more_than_is_allowed(
    still: Path, capsys: pytest.CaptureFixture[str], command: Command, changes: dict[str, Any]
) -> None:
    """What else is refused: tests/answers/tune/recipes/test_recipe.py. Every command reads recipes in one way."""
    (fields,) = changes.values()
    refused(command, recipe_file(still.parent, **changes), *fields, capsys)


def test_recipes_that_cannot_be_used_do_not_keep_the_others_from_the_list(
    still: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_file(still.parent, recipe={"vllm": "0\rtrust-remote-code: true"}).rename(still.parent / "r.toml")
    (still.parent / "recipes").mkdir()
    (still.parent / "r.toml").rename(still.parent / "recipes" / "stranger.toml")
    assert run(["recipe", "list"]) == 0
    said = capsys.readouterr().out
    assert "unusable" in said.partition("stranger ")[2] and "tiny-opt-cpu" in said


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"evidence": {"engine_args": ["--tr"]}}, "--tr"),
        ({"evidence": {"engine_args": ["--seed", "1", "-cc.backend", "evil_module.backend"]}}, "--seed"),
        ({"evidence": {"workload": "trace:path=/dev/zero"}}, "trace"),
        ({"recipe": {"model": "./evil"}}, "./evil"),
        ({"recipe": {"model": "someone/hub-model"}}, "someone/hub-model"),
    ],
)
def test_a_recipes_evidence_runs_no_more_than_is_allowed(
    still: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], names: str
) -> None:
    refused(RECIPE_COMMANDS["verify"], recipe_file(still.parent, **changes), names, capsys)


@pytest.mark.parametrize(
    "settings", [{"trust_remote_code": True}, {"block_size": "--tr"}, {"policy": "evil"}], ids=str
)
def test_a_study_of_a_stranger_cannot_bring_settings_that_no_file_may_have(
    still: Path, settings: dict[str, Any]
) -> None:
    bench = Setup(model="tiny-opt", load=Load(spec="rounds", seed=0, hash="h"), core="kvtune")
    path = still.parent / "study.jsonl"
    head = Head(kvtune_journal=FORMAT, kind="tune", bench=bench.filed())
    trial = Trial(number=1, settings=settings, on="sim")
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in (head, trial)))
    with pytest.raises(UsageError, match=r"study\.jsonl, line 2: .*"), StudyJournal(path, "tune", bench):
        pass


def test_a_studys_journal_keeps_no_key(tmp_path: Path) -> None:
    bench = Setup(
        model="tiny-opt",
        load=Load(spec="rounds", seed=0, hash="h"),
        engine_args=["--hf-token", "hush"],
        core="kvtune",
    )
    for _ in range(2):  # and is resumed by the same command
        with StudyJournal(tmp_path / "study.jsonl", "tune", bench):
            pass
    assert "hush" not in (tmp_path / "study.jsonl").read_text()


def test_trust_says_what_it_allows_and_takes_the_file_as_it_is(
    still: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[str, list[str]]] = []

    def replayed(recorded: Run, *, trusted: bool, model: str, **more: object) -> None:
        settings = Setup.of_run(recorded, model=model, trusted=trusted)
        taken.append((settings.model, settings.engine_args))
        raise KvtuneError("enough", "")

    monkeypatch.setattr("kvtune.answers.explain.explanation.bench_of", replayed)
    path = evil_run(still.parent, args=["--tr", "--seed\x1b[2J", "1"])
    assert run(["explain", str(path), "--trust"]) == EXIT_FAILED
    said = next(line for line in capsys.readouterr().err.splitlines() if line.startswith("--trust: "))
    assert "code included" in said and str(still.parent / "evil") in said and "--tr" in said
    assert said.isprintable()
    assert taken == [(str(still.parent / "evil"), ["--tr", "--seed\x1b[2J", "1"])]


def test_trust_is_for_a_file_that_is_given(still: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "tiny-opt", "--on", "sim", "--trust"]) == EXIT_USAGE
    assert "--trust is read only with --like RUN: it is for the file of --like" in one_line(capsys)


def forged(folder: Path, name: str) -> Path:
    """A recipe that says that it was confirmed, with the checksum that anyone can compute."""
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    loaded = read_recipe(sorted((GOLDEN.parents[1] / "recipes").glob("*.toml"))[0])
    about = msgspec.structs.replace(loaded.recipe, status="confirmed", note="forged")
    write_recipe(msgspec.structs.replace(loaded, recipe=about), path)
    return path


def test_a_checksum_that_anyone_can_compute_is_not_called_a_proof(
    still: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = forged(still.parent, "recipes/forged.toml")
    assert run(["recipe", "list"]) == 0
    lines = {line.partition("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["forged"].endswith("confirmed, as its maker says") or "device" in lines["forged"]
    assert "maker" in lines["forged"] and not any(
        "maker" in lines[name] for name in lines if name != "forged"
    )
    assert run(["recipe", "show", str(path)]) == 0
    assert "the checksum finds damage, not forgery" in capsys.readouterr().out
    assert run(["recipe", "show", "tiny-opt-cpu"]) == 0
    assert "forgery" not in capsys.readouterr().out


def test_a_name_is_the_shipped_recipe_and_not_a_file_beside(
    still: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tiny-opt-cpu", "recipes/tiny-opt-cpu.toml"):
        forged(still.parent, name)
    for name, mine in (("tiny-opt-cpu", False), ("./tiny-opt-cpu", True)):
        assert run(["recipe", "show", name]) == 0
        assert ("forged" in capsys.readouterr().out) is mine


def test_another_users_recipes_are_found_by_no_name(
    still: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder's, and a file's that someone put into a folder of this user."""
    path = forged(still.parent, "recipes/forged.toml")
    me = os.getuid()
    monkeypatch.setattr("kvtune.answers.tune.recipes.shelf.os.getuid", lambda: me + 1)
    assert run(["recipe", "show", "forged"]) == EXIT_USAGE
    assert "no recipe forged" in capsys.readouterr().err
    assert run(["recipe", "list"]) == 0
    assert "forged" not in capsys.readouterr().out
    assert run(["recipe", "show", str(path)]) == 0, "a path is the user's own word"
