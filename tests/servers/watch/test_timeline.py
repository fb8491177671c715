"""What a recording keeps over time: a row a look, with restarts and lost looks, causes that add up, a bound of rows."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtune.servers.watch.timeline as timeline
from kvtune.base.errors import KvtuneError
from kvtune.data.file_flags import on_the_list
from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.types import TABLES, Run
from kvtune.requests.log.requests_log import read_log
from kvtune.servers.watch.metrics import read
from kvtune.servers.watch.record import run_of
from kvtune.servers.watch.timeline import Timeline
from kvtune.servers.watch.totals import Look, Totals
from tests.servers.watch.played import Answers, counters, histogram, recorder
from tests.servers.watch.test_server import Playing

BUCKETS = (0.1, 1.0, 10.0)


def metrics(
    queries: int = 0,
    hits: int = 0,
    *,
    running: int = 0,
    output: int = 0,
    first: Sequence[float] = (),
    queue: Sequence[float] = (),
    **more: Any,
) -> str:
    """A server's /metrics. `first`, `queue`: the seconds of each request so far."""
    times = (("time_to_first_token_seconds", first), ("request_queue_time_seconds", queue))
    text = counters(queries, hits, running=running, output=output, **more)
    return text + "".join(histogram(name, values, BUCKETS) for name, values in times)


def recorded(answers: Answers, texts: Sequence[str | None], tmp_path: Path) -> Run:
    """A recording whose looks got these answers; None: the server gave none."""
    with recorder(answers) as recording:
        for number, text in enumerate(texts):
            answers.paths["/metrics"] = (503, "busy") if text is None else (200, text)
            if not number:
                recording.start()
                continue
            recording.look()
        run = run_of(recording, None, [], ["kvtune", "record"], on_the_list)
    write_run(run, tmp_path / "a.kvrun")
    return read_run(tmp_path / "a.kvrun")


def test_a_restart_and_a_lost_look_are_in_the_row_that_covers_them(tmp_path: Path) -> None:
    run = recorded(
        Answers(""),
        [
            metrics(100, 40, running=2, output=5, done=1, first=[0.05]),
            metrics(300, 90, running=2, waiting=3, output=9, done=2, first=[0.05, 4.0], queue=[0.0, 3.0]),
            None,
            None,
            metrics(500, 190, running=2, waiting=3, output=9, done=2, first=[0.05, 4.0], queue=[0.0, 3.0]),
            metrics(70, 30, running=1, output=2, first=[0.5, 20.0], started=time.time()),
        ],
        tmp_path,
    )
    looks = run.table("looks")
    assert looks["lost"].tolist() == [0, 2, 0] and looks["restarts"].tolist() == [0, 0, 1]
    assert looks["query_tokens"].tolist() == [200, 200, 70] and looks["hit_tokens"].tolist() == [50, 100, 30]
    assert looks["output_tokens"].tolist() == [4, 0, 2] and looks["answered"].tolist() == [1, 0, 0]
    assert looks["came"].tolist() == [4, 0, 1]
    assert looks["first_tokens"].tolist() == [1, 0, 2]
    assert looks["first_token_s"].tolist() == pytest.approx([4.0, 0.0, 20.5])
    assert looks["stalled_s"][1] == pytest.approx(looks["until_s"][1] - looks["t_s"][1])
    assert looks["stalled_s"][[0, 2]].tolist() == [0, 0]
    assert looks["t_s"][1:].tolist() == looks["until_s"][:-1].tolist()
    times = run.table("look_times")
    rows = zip(*(times[name].tolist() for name in TABLES["look_times"]), strict=True)
    assert [row for row in rows if row[1] == "first_token" and row[0] == 0] == [(0, "first_token", 1, 10, 1)]
    last = (times["look"] == 2) & (times["what"] == "first_token")
    assert times["above_s"][last].tolist() == [0.1, 10.0] and times["count"][last].tolist() == [1, 1]
    assert np.isnan(times["upto_s"][last][1])


def test_what_a_server_does_not_publish_is_unknown_and_not_zero(tmp_path: Path) -> None:
    few = "vllm:num_requests_running 1.0\nvllm:prompt_tokens_total 5.0\n"
    looks = recorded(Answers(""), [few, few], tmp_path).table("looks")
    for name in ("waiting", "pool_use", "query_tokens", "hit_tokens", "output_tokens", "came", "answered"):
        assert np.isnan(looks[name]).all(), name
    for name in ("first_tokens", "first_token_s", "queued", "queue_s", "stalled_s"):
        assert np.isnan(looks[name]).all(), name
    assert looks["running"].tolist() == [1]


def test_causes_of_all_rows_and_hits_add_up_to_the_prompt_tokens(tmp_path: Path) -> None:
    playing = Playing()
    with recorder(playing.answers, settle=0.0) as recording:
        recording.start()
        playing.play()
        for _ in range(4):
            time.sleep(0.05)
            recording.look()
        run = run_of(recording, None, [], ["kvtune", "record"], on_the_list)
    playing.publisher.close()
    looks, misses = run.table("looks"), run.table("look_misses")
    assert looks["query_tokens"].sum() == 26605 and looks["hit_tokens"].sum() == 7232
    assert misses["tokens"].sum() == 26605 - 7232
    account = run.header.extra.server
    assert account is not None
    by_cause = {
        cause: int(misses["tokens"][misses["cause"] == cause].sum())
        for cause in set(misses["cause"].tolist())
    }
    assert by_cause == {cause: tokens for cause, tokens in account.misses.items() if tokens}


def test_a_row_whose_misses_have_no_cause_yet_says_so() -> None:
    made, totals = Timeline(), Totals()
    made.add(read(metrics(0), 0.0), totals.begin(Look(0.0)), 0)
    made.add(read(metrics(100, 20), 1.0), totals.add(Look(1.0, 100, 20)), 0)
    tables = made.tables(0.0)
    assert tables["look_misses"]["cause"].tolist() == ["computing"]
    assert tables["look_misses"]["tokens"].tolist() == [80]


def test_a_long_recording_has_a_bounded_number_of_rows_and_loses_no_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timeline, "MOST_ROWS", 16)
    made, totals, answers = Timeline(), Totals(), 1000
    made.add(read(metrics(0), 0.0), totals.begin(Look(0.0, on=False)), 0)
    for at in range(1, answers + 1):
        if at == 500:
            made.lose()
        text = metrics(10 * at, 4 * at, waiting=40 if at == 700 else 1, first=[0.5] * at, done=at)
        made.add(read(text, float(at)), totals.add(Look(float(at), 10 * at, 4 * at, on=False)), 0)
    tables = made.tables(0.0)
    looks = tables["looks"]
    assert len(looks["t_s"]) <= 16
    assert looks["t_s"][0] == 0 and looks["until_s"][-1] == answers
    assert looks["t_s"][1:].tolist() == looks["until_s"][:-1].tolist()
    assert looks["query_tokens"].sum() == 10 * answers and looks["hit_tokens"].sum() == 4 * answers
    assert looks["waiting"].max() == 40 and looks["lost"].sum() == 1
    assert tables["look_times"]["count"].sum() == answers == looks["first_tokens"].sum()
    assert tables["look_misses"]["tokens"].sum() == 6 * answers


def test_a_row_that_names_no_look_is_refused(tmp_path: Path) -> None:
    run = recorded(Answers(""), [metrics(0), metrics(10, 4), metrics(30, 10)], tmp_path)
    run.tables["look_misses"]["look"][-1] = 2
    write_run(run, tmp_path / "b.kvrun")
    with pytest.raises(KvtuneError, match=r"look_misses\.look names row 2 of 2 looks"):
        read_run(tmp_path / "b.kvrun")


def test_a_clients_class_of_a_request_is_its_kind(tmp_path: Path) -> None:
    begun = time.time()
    lines = [
        {"prompt": [1, 2], "answer": [3], "t0": begun, "t1": begun + 0.001, "hit": 0, **more}
        for more in ({"kind": "chat", "name": "a"}, {"class": "batch"}, {}, {"kind": 7})
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    answers = Answers(metrics(8, 0))
    with recorder(answers) as recording:
        recording.start()
        recording.look()
        recording.begun = begun - 1
        recording.seconds += 2
        run = run_of(recording, log, list(read_log(log)), ["kvtune"], on_the_list)
    assert sorted(run.table("requests")["kind"].tolist()) == ["batch", "chat", "log", "log"]
