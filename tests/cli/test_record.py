"""`kvtune record` loses nothing: not to a wrong answer, a signal, a kill, a full disk, or strange text."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvtune.base.errors import KvtuneError
from kvtune.cli import record as module
from kvtune.cli.signals import noted
from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.types import Run
from tests.clocks import SKIPPING
from tests.servers.watch.played import Answers, counters, http, until
from tests.simulator import run

GOOD = counters(100, 40)


@contextmanager
def recording(*words: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-m", "tests.clocks", "record", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=cwd, env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


def test_a_killed_recording_leaves_what_was_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = Answers(GOOD)
    partial = tmp_path / "a.partial.kvrun"
    with http(answers) as base, recording(base, "-o", "a.kvrun", "--seconds", "100", cwd=tmp_path) as child:
        until(partial.exists)
        answers.paths["/metrics"] = (200, counters(5000, 400))
        until(lambda: (s := read_run(partial).header.extra.server) is not None and s.query_tokens == 4900)
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert not (tmp_path / "a.kvrun").exists()
        header = read_run(partial).header
        assert (header.state, header.why) == ("partial", "the recording was killed")
        assert run(["explain", str(partial)]) == 0 and "4,900" in capsys.readouterr().out
        assert run(["record", base, "-o", str(tmp_path / "a.kvrun"), "--seconds", "1"], SKIPPING) == 2
    assert "left of a recording that was killed" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.partial.kvrun"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_does_not_stop_the_writing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    answers = Answers(GOOD)

    def ended(_: object) -> str:
        if len(answers.seen) == 9:
            os.kill(os.getpid(), number)
        return GOOD

    def interrupted(made: Run, path: Path, *, new: bool = False) -> None:
        if "partial" not in path.name:
            os.kill(os.getpid(), number)
        write_run(made, path, new=new)

    answers.paths["/metrics"] = (200, ended)
    monkeypatch.setattr("kvtune.data.run.file.write_run", interrupted)
    with http(answers) as base:
        assert run(["record", base, "-o", str(tmp_path / "a.kvrun"), "--seconds", "100"], SKIPPING) == 0
    said, name = capsys.readouterr().err, "Ctrl-C" if number == signal.SIGINT else number.name
    assert f"ended by {name}" in said and "a.kvrun" in said
    assert read_run(tmp_path / "a.kvrun").header.state == "complete" and len(answers.seen) < 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.kvrun"]


def test_signals_in_a_block_are_noted_and_later_ones_act_again() -> None:
    with noted() as names:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert names == ["SIGINT", "SIGTERM"]
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_a_recording_in_a_scripts_background_obeys_sigint_and_nothing_else_that_is_ignored() -> None:
    before = [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)]
    try:
        with noted() as names:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGHUP)
            assert names == ["SIGINT"]
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
            signal.signal(number, handler)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/metrics", GOOD.replace("100.0", "NaN")),
        ("/metrics", GOOD.replace("100.0", "+Inf")),
        ("/metrics", "x" * (9 << 20)),
        ("/version", '{"version": "0.32\\ud800"}'),
        ("/version", "[" * 100_000),
        ("/v1/models", '{"data": [{"max_model_len": true}]}'),
        ("/v1/models", '{"data": [{"max_model_len": ' + "9" * 4000 + "}]}"),
    ],
)
def test_a_wrong_answer_loses_one_look_and_not_the_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, text: str
) -> None:
    answers = Answers(GOOD)
    if path == "/metrics":
        seen = lambda: sum(asked == "/metrics" for _, asked, _ in answers.seen)  # noqa: E731
        answers.paths["/metrics"] = (200, lambda _: text if seen() == 4 else GOOD)
    else:
        answers.paths[path] = (200, text)
    with http(answers) as base:
        assert run(["record", base, "-o", str(tmp_path / "a.kvrun"), "--seconds", "2"], SKIPPING) == 0
    header = read_run(tmp_path / "a.kvrun").header
    assert header.state == "complete" and header.engine.max_model_len in (0, 4096)
    capsys.readouterr()
    assert run(["explain", str(tmp_path / "a.kvrun")]) == 0
    assert "unexpected" not in capsys.readouterr().err


def test_a_server_that_says_nothing_right_any_more_is_named_in_the_file(tmp_path: Path) -> None:
    answers = Answers(GOOD)
    answers.paths["/metrics"] = (
        200,
        lambda _: GOOD if len(answers.seen) < 8 else GOOD.replace("100.0", "NaN"),
    )
    with http(answers) as base:
        assert run(["record", base, "-o", str(tmp_path / "a.kvrun"), "--seconds", "3"], SKIPPING) == 0
    header = read_run(tmp_path / "a.kvrun").header
    assert header.state == "partial" and "is nan" in header.why


def test_a_servers_labels_give_no_flag_that_is_not_on_the_list(tmp_path: Path) -> None:
    labels = (
        'mamba_cache_mode="--trust-remote-code",mamba_block_size="x --trust-remote-code",'
        'prefix_cache_retention_interval="None",prefix_match_unit="--enforce-eager",kv_offloading_size="9e99",'
    )
    answers = Answers(GOOD.replace("cache_config_info{", "cache_config_info{" + labels))
    with http(answers) as base:
        assert run(["record", base, "-o", str(tmp_path / "a.kvrun"), "--seconds", "1"], SKIPPING) == 0
    header = read_run(tmp_path / "a.kvrun").header
    assert header.engine.args == [
        *("--block-size", "32", "--num-gpu-blocks-override", "200", "--max-model-len", "4096")
    ]
    assert any("--mamba-block-size, --kv-offloading-size are not taken" in note for note in header.notes)


def test_half_a_character_of_a_file_name_does_not_stop_the_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = os.fsdecode(b"a\xff.kvrun")
    monkeypatch.setattr(sys, "argv", ["kvtune", "record", name])
    with http(Answers(GOOD)) as base:
        assert run(["record", base, "-o", str(tmp_path / name), "--seconds", "1"], SKIPPING) == 0
    assert read_run(tmp_path / name).header.command[-1] == "a\ufffd.kvrun"


def test_a_folder_that_vanished_is_said_and_another_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone, here = tmp_path / "gone", tmp_path / "here"
    gone.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    answers = Answers(GOOD)

    def vanishes(_: object) -> str:
        if gone.exists() and len(answers.seen) > 6:
            for path in gone.iterdir():
                path.unlink()
            gone.rmdir()
        return GOOD

    answers.paths["/metrics"] = (200, vanishes)
    with http(answers) as base:
        assert run(["record", base, "-o", str(gone / "a.kvrun"), "--seconds", "3"], SKIPPING) == 0
    said = capsys.readouterr().err
    assert "cannot write the run file" in said and f"wrote {here / 'a.kvrun'}" in said
    assert read_run(here / "a.kvrun").header.extra.server is not None


def test_where_no_file_can_be_written_at_the_end_the_partial_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(made: Run, path: Path, *, new: bool = False) -> None:
        if "partial" not in path.name:
            raise KvtuneError(f"cannot write the run file {path}: No space left on device", "free space")
        write_run(made, path, new=new)

    monkeypatch.setattr("kvtune.data.run.file.write_run", full)
    with http(Answers(GOOD)) as base:
        assert run(["record", base, "-o", str(tmp_path / "a.kvrun"), "--seconds", "1"], SKIPPING) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "No space left on device" in said and "a.partial.kvrun holds what was seen" in said
    monkeypatch.undo()
    assert read_run(tmp_path / "a.partial.kvrun").header.extra.server is not None


def test_a_third_signal_leaves_out_the_rest_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps({"prompt": "Hi", "t0": 1.0, "t1": 2.0}) + "\n" for _ in range(9)))
    answers = Answers(GOOD)
    asked: list[object] = []

    def tokenized(body: object) -> str:
        asked.append(body)
        os.kill(os.getpid(), signal.SIGINT)
        return '{"tokens": [1, 2]}'

    answers.paths["/tokenize"] = (200, tokenized)
    words = ["record", "--seconds", "1", "--requests", str(log), "-o", str(tmp_path / "a.kvrun")]
    with http(answers) as base:
        assert run([*words, base], SKIPPING) == 1
    assert len(asked) == module.ENOUGH and "was not read: SIGINT" in capsys.readouterr().err
    assert read_run(tmp_path / "a.kvrun").header.extra.server is not None


def test_a_recording_of_several_servers_names_each_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.kvrun"
    with http(Answers(GOOD)) as base, http(Answers(GOOD)) as other:
        assert run(["record", base, other, "-o", str(file), "--seconds", "1"], SKIPPING) == 0
    assert f"recording {base}, {other} for 1 s" in capsys.readouterr().err
    server = read_run(file).header.extra.server
    assert server is not None and server.fleet is not None
    assert [each.url for each in server.fleet.servers] == [base, other]
