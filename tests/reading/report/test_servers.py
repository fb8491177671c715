"""Two recordings of one server: what differed in the traffic and in the server, by name and by class."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtune.data.run.file import write_run
from kvtune.data.run.types import Run, WorkloadInfo
from kvtune.data.show.markdown import markdown
from kvtune.data.show.page import document_page
from kvtune.data.tally import Hits
from kvtune.reading.analysis.latency import of_server_ms
from kvtune.reading.report.comparison import document
from kvtune.reading.report.contrast import contrast
from kvtune.reading.report.servers import Pairs, servers
from tests.reading.analysis.made import table
from tests.reading.analysis.over_time import ten_minutes
from tests.simulator import run as kvtune


def with_log(run: Run, names: list[str], kinds: list[str], hits: list[int]) -> Run:
    of = np.arange(len(names), dtype=float)
    requests = table(
        "requests",
        id=names,
        kind=kinds,
        prompt_tokens=[100] * len(names),
        hit_tokens=hits,
        sent_s=of,
        planned_s=of,
        first_token_s=[np.nan] * len(names),
        finished_s=of + 1,
        finish=["length"] * len(names),
    )
    return Run(run.header, {**run.tables, "requests": requests})


def two() -> tuple[Run, Run]:
    workload = WorkloadInfo(name="requests", spec="", params={}, seed=0, hash="another", requests=4)
    calm, bad = ten_minutes(bad=False), ten_minutes()
    bad = Run(msgspec.structs.replace(bad.header, workload=workload), bad.tables)
    return (
        with_log(calm, ["a", "b", "c", "line-4"], ["chat", "chat", "batch", "log"], [90, 80, 10, 5]),
        with_log(bad, ["a", "b", "d", "line-4"], ["chat", "batch", "batch", "log"], [40, 80, 0, 5]),
    )


def test_recordings_of_other_traffic_are_compared_without_anyway(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / "two_pm.kvrun", tmp_path / "three_pm.kvrun"]
    for run, file in zip(two(), files, strict=True):
        write_run(run, file)
    assert kvtune(("compare", *map(str, files))) == 0
    out, err = capsys.readouterr()
    said = " ".join(out.split())
    assert "did not do the same work" not in err
    assert "Traffic: requests a second 2 -> 2.4; prompt tokens a second 1,000 -> 1,300" in said
    assert "prompt tokens seen before 70.0 % -> 51.5 %" in said
    assert "Server: hit 50.0 % -> 36.2 %; never seen before 30.0 % -> 48.5 %" in said
    assert "first token, mean 200 ms -> 622 ms" in said
    assert "first token, slowest of 100 between 100 ms and 250 ms -> between 2.5 s and 7.5 s" in said
    assert "most waiting 0 -> 30" in said
    assert (
        "three_pm against two_pm: hits 50.0 % -> 36.2 %; figures not judged, as the traffic differs." in said
    )
    assert (
        "2 requests are in both logs, by name: 85.0 % of their prompt tokens hit, then 60.0 %; 0 requests"
        in said
    )
    kvtune(("compare", *map(str, files), "--json"))
    told = json.loads(capsys.readouterr().out)
    assert told["comparable"] and told["servers"]["pairs"][0]["fewer"] == 1
    assert {row["name"]: row["values"] for row in told["servers"]["classes"]} == {
        "batch": [0.1, 0.4],
        "chat": [0.85, 0.4],
    }


def test_another_model_is_still_other_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, run in (("a", ten_minutes()), ("b", ten_minutes(model="another"))):
        write_run(run, tmp_path / f"{name}.kvrun")
    assert kvtune(("compare", str(tmp_path / "a.kvrun"), str(tmp_path / "b.kvrun"))) == 2
    assert "model differs" in capsys.readouterr().err


def test_the_page_and_markdown_have_the_tables() -> None:
    made = document(contrast(two(), ["two", "three"]))
    page, text = document_page(made), markdown(made)
    for title in ("What differs: the traffic", "What differs: the server", "What differs: hits by class"):
        assert title in page
    assert "requests of class chat" in page and "| requests of class chat |" in text
    assert "Traffic: requests a second" in page and "Traffic: requests a second" in text


def test_what_an_older_recording_does_not_hold_is_not_known() -> None:
    old = ten_minutes()
    made = servers(contrast([ten_minutes(bad=False), Run(old.header, {})], ["new", "old"]))
    assert made is not None and made.pairs == (None,)
    by_name = {fact.name: fact for fact in made.server}
    assert by_name["first token, mean"].texts == ("200 ms", "–")
    assert not by_name["first token, mean"].differs(1)
    assert by_name["hit"].texts == ("50.0 %", "36.2 %")


def test_names_that_come_twice_or_were_not_given_pair_nothing() -> None:
    one = with_log(ten_minutes(), ["a", "a", "line-3", "b"], ["log"] * 4, [1, 2, 3, 40])
    two = with_log(ten_minutes(), ["a", "c", "line-3", "b"], ["log"] * 4, [1, 2, 3, 50])
    made = servers(contrast([one, two], ["one", "two"]))
    assert made is not None and made.pairs == (Pairs(1, (Hits(100, 40), Hits(100, 50)), 1, 0),)
    assert made.classes == ()


def test_a_recording_without_a_log_has_hits_and_first_token_in_the_list_of_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(ten_minutes(bad=False), tmp_path / "a.kvrun")
    assert kvtune(("runs", str(tmp_path), "--json")) == 0
    (row,) = json.loads(capsys.readouterr().out)["runs"]
    assert row["hit_rate"] == 0.5 and row["ttft_ms_mean"] == pytest.approx(200)


def test_a_first_token_that_the_server_did_not_tell_is_unknown() -> None:
    looks = ten_minutes().table("looks")
    looks["first_token_s"][3] = np.nan
    assert of_server_ms(looks) == (None, 0)
