"""Each hint leads somewhere: what is named exists, and the command that is offered is another one than what failed."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvtune.answers.tune.document import words
from kvtune.base.errors import UsageError
from kvtune.data.run.file import write_run
from kvtune.data.run.types import CoreInfo, Run
from kvtune.lab.setup.like import engine_of, model_and_flags
from kvtune.reading.analysis.again import MODEL
from kvtune.reading.analysis.rebuild import rebuilt
from kvtune.reading.analysis.run import RunAnalysis
from tests.golden import studies
from tests.golden.synthetic import replace_header, rounds_run
from tests.reading.analysis.test_verdict import told
from tests.simulator import run as kvtune


def recording(spec: str = "", **header: object) -> Run:
    run = replace_header(rounds_run(), source="server", core=CoreInfo(name="stock"), **header)
    workload = msgspec.structs.replace(
        run.header.workload, name="requests" if spec else "server", spec=spec, seed=0, hash=""
    )
    engine = msgspec.structs.replace(run.header.engine, kv_specs={}, args=[])
    return replace_header(run, workload=workload, engine=engine)


def test_a_recording_without_a_log_names_the_option_that_gives_one() -> None:
    with pytest.raises(UsageError, match="without a log") as refused:
        rebuilt(recording(), Path("log.jsonl"))
    assert "--requests LOG" in refused.value.hint


def test_like_of_a_recording_says_that_no_recording_can_be_it() -> None:
    with pytest.raises(UsageError, match="a recording of a server has no KV specs") as refused:
        engine_of(recording())
    assert "record it again" not in refused.value.hint and "--trace LOG" in refused.value.hint


def test_a_log_of_another_time_is_not_called_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"prompt": [1, 2, 3], "output_tokens": 1, "t0": 5.0, "t1": 6.0}) + "\n")
    spec = f"requests:path={log},since=100,until=200"
    assert kvtune(["bounds", "-w", spec]) == 2
    said = capsys.readouterr().err
    assert "has 1 requests, and none was sent and answered between since=100 and until=200" in said
    assert "is empty" not in said and "written during the recording" in said


def unexplained() -> Run:
    run = recording("requests:path=log.jsonl,since=1,until=2", model="served-name")
    params = {"path": "log.jsonl", "since": 1.0, "until": 2.0}
    run = replace_header(run, workload=msgspec.structs.replace(run.header.workload, params=params))
    return told(run, evicted=60_000)


def test_the_command_that_explains_a_run_names_its_file_its_log_and_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict = RunAnalysis(unexplained(), None, "a b.kvrun").verdict
    assert verdict.command == f"kvtune explain 'a b.kvrun' --trace log.jsonl --model {MODEL}"
    assert "served-name is only the name it answers to" in verdict.advice
    write_run(unexplained(), tmp_path / "a.kvrun")
    assert kvtune(["report", str(tmp_path / "a.kvrun"), "--console"]) == 0
    said = capsys.readouterr().out
    assert f"kvtune explain {tmp_path / 'a.kvrun'} --trace log.jsonl" in said and "explain RUN" not in said
    own = told(rounds_run(), evicted=60_000)
    assert RunAnalysis(own, None, "own.kvrun").verdict.command == "kvtune explain own.kvrun"


def test_a_search_without_a_winner_does_not_offer_itself() -> None:
    study = studies.viewed(studies.grid_study(stock=0.9))
    _, advice, line = words(study)
    assert line.startswith("kvtune tune") and "search over all knobs" in advice
    tuned = msgspec.structs.replace(study, result=msgspec.structs.replace(study.result, kind="tune"))
    _, advice, line = words(tuned)
    assert line.startswith("kvtune bounds -w") and "search" not in advice


def test_a_sweep_of_stock_goes_on_without_the_core() -> None:
    study = studies.viewed(studies.grid_study())
    bench = msgspec.structs.replace(study.setup, core="stock")
    _, _, line = words(msgspec.structs.replace(study, setup=bench))
    assert line.startswith("kvtune tune") and "--core stock" in line


def test_a_built_in_model_is_replayed_in_the_type_that_a_server_takes() -> None:
    """kvtune's own engines run it in float32 on a CPU; a server takes what the config says."""
    run = recording("requests:path=x")
    assert model_and_flags(run, named="tiny-llama") == ("tiny-llama", ["--dtype", "auto"])
    assert model_and_flags(run, named="org/model") == ("org/model", [])
    given = msgspec.structs.replace(run.header.engine, args=["--dtype", "float32"])
    assert model_and_flags(replace_header(run, engine=given), named="tiny-llama")[1] == ["--dtype", "float32"]
    own = replace_header(run, source="engine")
    assert model_and_flags(own, named="tiny-llama") == ("tiny-llama", [])
