"""The server's own times of its steps and requests, in a recording."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from kvtune.data.file_flags import on_the_list
from kvtune.data.run.file import read_run, write_run
from kvtune.servers.watch.metrics import SERVED, read, served
from kvtune.servers.watch.record import _core, run_of
from tests.servers.watch.played import Answers, counters, histogram, recorder


def metrics(steps: int) -> str:
    return counters(100 * steps, 0) + "".join(
        (
            histogram("iteration_tokens_total", [110.0] * steps),
            histogram("time_to_first_token_seconds", [0.25] * 2 * steps),
            histogram("inter_token_latency_seconds", [0.025] * 10 * steps),
            histogram("request_queue_time_seconds", [0.125] * steps),
            histogram("request_prefill_time_seconds", [0.25] * steps),
            histogram("request_decode_time_seconds", [0.5] * steps),
        )
    )


def test_a_recording_keeps_the_servers_times(tmp_path: Path) -> None:
    answers = Answers(metrics(3))
    with recorder(answers, ran_s=0.1) as recording:
        answers.paths["/metrics"] = (200, metrics(5))
        recording.look()
        made = run_of(recording, None, [], ["kvtune", "record"], on_the_list)
    write_run(made, tmp_path / "r.kvrun")
    kept = read_run(tmp_path / "r.kvrun").table("server")
    last = {name: float(kept[name][-1]) for name in SERVED}
    assert last["steps"] == 5 and last["step_tokens"] == 550
    assert (last["first_tokens"], last["first_token_s"]) == (10, 2.5)
    assert (last["gaps"], last["gap_s"]) == (50, pytest.approx(1.25))
    assert [last[name] for name in ("answered", "queue_s", "prefill_s", "decode_s")] == [5, 0.625, 1.25, 2.5]
    assert kept["steps"][0] == 3


def test_a_server_without_these_series_has_zeros() -> None:
    assert set(served(read(counters(1, 0), 0.0)).values()) == {0.0}


def test_a_recording_of_an_older_kvtune_is_read(tmp_path: Path) -> None:
    with recorder(Answers(metrics(3)), ran_s=0.1) as recording:
        made = run_of(recording, None, [], ["kvtune", "record"], on_the_list)
    write_run(made, tmp_path / "new.kvrun")
    with zipfile.ZipFile(tmp_path / "new.kvrun") as new, zipfile.ZipFile(tmp_path / "old.kvrun", "w") as old:
        for name in new.namelist():
            if name not in {f"tables/server/{column}.npy" for column in SERVED}:
                old.writestr(name, new.read(name))
        assert len(new.namelist()) - len(old.namelist()) == len(SERVED)
    kept = read_run(tmp_path / "old.kvrun").table("server")
    assert not kept["steps"].any() and np.isnan(kept["gap_s"]).all()


CORE_METRICS = """# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 0.0
# TYPE kvtune_core_active gauge
kvtune_core_active 1.0
# TYPE kvtune_core_settings gauge
kvtune_core_settings{settings="{\\"policy\\":\\"two_class\\",\\"slack\\":-1,\\"new\\":1}"} 1.0
"""


def test_a_server_that_runs_kvtunes_core_is_recorded_with_it() -> None:
    scrape = read(CORE_METRICS, 1.0)
    core = _core(scrape.core)
    assert core.name == "kvtune" and core.active and core.settings["policy"] == "two_class"
    assert core.settings["slack"] == 512 and "new" not in core.settings, "only legal values of known knobs"
    stock = read(CORE_METRICS.replace("active 1.0", "active 0.0"), 1.0)
    assert stock.core is None and _core(stock.core).name == "stock"
    odd = read(CORE_METRICS.replace('settings="{', 'settings="['), 1.0)
    assert odd.core == {}, "it runs the core; its settings are not known"
