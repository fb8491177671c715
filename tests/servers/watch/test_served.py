"""The server's own times of its steps and requests, in a recording."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from kvtune.data.file_flags import on_the_list
from kvtune.data.run.file import read_run, write_run
from kvtune.servers.watch.metrics import SERVED, read, served
from kvtune.servers.watch.record import Recording, run_of
from kvtune.servers.watch.server import Server
from kvtune.servers.watch.watching import Watching
from tests.servers.watch.played import Answers, counters, http

LABELS = '{engine="0",model_name="tiny"}'


def histogram(name: str, count: int, total: float) -> str:
    """As vLLM publishes one."""
    whole = '{engine="0",le="+Inf",model_name="tiny"}'
    return (
        f"# TYPE vllm:{name} histogram\nvllm:{name}_bucket{whole} {count}.0\n"
        f"vllm:{name}_count{LABELS} {count}.0\nvllm:{name}_sum{LABELS} {total}\n"
    )


def metrics(steps: int) -> str:
    return counters(100 * steps, 0) + "".join(
        (
            histogram("iteration_tokens_total", steps, 110.0 * steps),
            histogram("time_to_first_token_seconds", 2 * steps, 0.5 * steps),
            histogram("inter_token_latency_seconds", 10 * steps, 0.25 * steps),
            histogram("request_queue_time_seconds", steps, 0.1),
            histogram("request_prefill_time_seconds", steps, 0.2),
            histogram("request_decode_time_seconds", steps, 0.3),
        )
    )


def test_a_recording_keeps_the_servers_times(tmp_path: Path) -> None:
    answers = Answers(metrics(3))
    with http(answers) as base:
        recording = Recording(Watching(Server(base)))
        recording.run(0.1, lambda _: True)
        answers.paths["/metrics"] = (200, metrics(5))
        recording.keep(recording.watching.look())
        made = run_of(recording, None, [], ["kvtune", "record"], on_the_list)
        recording.watching.close()
    write_run(made, tmp_path / "r.kvrun")
    kept = read_run(tmp_path / "r.kvrun").table("server")
    last = {name: float(kept[name][-1]) for name in SERVED}
    assert last["steps"] == 5 and last["step_tokens"] == 550
    assert (last["first_tokens"], last["first_token_s"]) == (10, 2.5)
    assert (last["gaps"], last["gap_s"]) == (50, 1.25)
    assert [last[name] for name in ("answered", "queue_s", "prefill_s", "decode_s")] == [5, 0.1, 0.2, 0.3]
    assert kept["steps"][0] == 3


def test_a_server_without_these_series_has_zeros() -> None:
    assert set(served(read(counters(1, 0), 0.0)).values()) == {0.0}


def test_a_recording_of_an_older_kvtune_is_read(tmp_path: Path) -> None:
    with http(Answers(metrics(3))) as base:
        recording = Recording(Watching(Server(base)))
        recording.run(0.1, lambda _: True)
        made = run_of(recording, None, [], ["kvtune", "record"], on_the_list)
        recording.watching.close()
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
    from kvtune.servers.watch.metrics import read
    from kvtune.servers.watch.record import _core

    scrape = read(CORE_METRICS, 1.0)
    core = _core(scrape.core)
    assert core.name == "kvtune" and core.active and core.settings["policy"] == "two_class"
    assert core.settings["slack"] == 512 and "new" not in core.settings, "only legal values of known knobs"
    stock = read(CORE_METRICS.replace("active 1.0", "active 0.0"), 1.0)
    assert stock.core is None and _core(stock.core).name == "stock"
    odd = read(CORE_METRICS.replace('settings="{', 'settings="['), 1.0)
    assert odd.core == {}, "it runs the core; its settings are not known"
