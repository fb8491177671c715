"""`--api-server-count N`: vLLM's own server is the front end of a run, and the run is as with AsyncLLM."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest

from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.run.file import read_run
from kvtune.data.run.types import Run
from kvtune.lab.device.cost import StepCost
from kvtune.lab.device.settings import Timed
from kvtune.lab.engine.front_end.client import NAME
from kvtune.lab.engine.front_end.server import command
from kvtune.lab.engine.messages import Event, HostPlan
from kvtune.lab.engine.profile import EngineBench
from kvtune.lab.setup.setup import Load, Setup
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.requests.loads.spec import build
from tests.lab.engine.real import alive, commands, engine_of

COST = StepCost(step_us=2000.0, prefill_token_us=5.0, decode_us=50.0, kv_token_us=0.0)
LOAD = "rounds:prefixes=16,prefix=500,suffix=40,output=50,rounds=3,concurrency=8"
REQUESTS, OUTPUT = 48, 50


def test_the_command_is_vllm_serve_with_the_plans_flags() -> None:
    flags = ["--model", "folder", "--max-num-seqs", "8", "--port", "1", "--api-server-count", "2"]
    flags += ["--api-key", "mine", "--middleware", "mine.Middleware"]
    plan = HostPlan(setup=Setup(model="tiny-opt"), vllm_args=flags, api_servers=3)
    words = command(plan, 4711)
    assert words[1:4] == ["-m", "kvtune.lab.engine.front_end.api_servers", "folder"]
    assert "--model" not in words and words.count("--port") == 1
    for name, value in (("port", "4711"), ("api-server-count", "3"), ("max-num-seqs", "8")):
        assert words[words.index(f"--{name}") + 1] == value
    assert words[words.index("--served-model-name") + 1] == NAME
    assert "--api-key" not in words and "mine.Middleware" in words
    assert words[-2:] == ["--middleware", "kvtune.lab.engine.front_end.key.OwnClientOnly"]


def setup(*flags: str, load: str = LOAD) -> Setup:
    device = Timed(cost=COST, name="made")
    workload = build(load, seed=0)
    return Setup(
        model="tiny-gemma3", load=Load.of(workload), engine_args=list(flags), device=device, core="kvtune"
    )


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--api-server-count", "0"), "no number of API servers"),
        (("--api-server-count", "many"), "no number of API servers"),
        (("--api-server-count", "2", "--kv-offloading-size", "1"), "--kv-offloading-size is not measured"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    tmp_path: Path, flags: tuple[str, ...], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        EngineBench(tmp_path).run(setup(*flags))
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """AsyncLLM's and two API servers'."""
    output = tmp_path_factory.mktemp("servers")
    made = [EngineBench(output).run(setup(*flags)) for flags in ((), ("--api-server-count", "2"))]
    assert all(one.error is None for one in made)
    assert not [p for p in output.iterdir() if p.is_dir()]
    return made[0].run, made[1].run


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_run_behind_two_api_servers_has_what_a_run_of_asyncllm_has(runs: tuple[Run, Run]) -> None:
    plain, behind = runs
    assert behind.header.source == "host" and behind.header.state == "complete"
    ours, theirs = behind.header.engine, plain.header.engine
    settings = {**ours.settings}
    assert settings.pop("api_server_count") == 2 and "api_server_count" not in theirs.settings
    assert settings == theirs.settings
    same = (
        "vllm",
        "device",
        "device_name",
        "executor",
        "block_size",
        "num_blocks",
        "async_scheduling",
        "groups",
    )
    assert [getattr(ours, name) for name in same] == [getattr(theirs, name) for name in same]
    a, b = plain.table("requests"), behind.table("requests")
    for column in ("prompt_tokens", "output_tokens", "finish", "answer_crc"):
        assert a[column].tolist() == b[column].tolist(), column
    assert b["hit_tokens"][b["round"] == 0].sum() == 0
    assert a["hit_tokens"].sum() == b["hit_tokens"].sum() > 0
    tokens = behind.table("tokens")
    assert tokens["count"].sum() == REQUESTS * OUTPUT and np.isnan(tokens["made_s"]).all()
    assert (b["sent_s"] < b["first_token_s"]).all()
    # A client that got no CPU reads all of an answer at once.
    assert (b["first_token_s"] <= b["finished_s"]).all() and (b["first_token_s"] < b["finished_s"]).any()
    assert len(behind.table("steps")["t_s"]) > OUTPUT and "receipts" not in behind.tables


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_it_says_what_it_does_not_know_and_counts_as_vllm(runs: tuple[Run, Run]) -> None:
    _, behind = runs
    assert any("preemptions by request" in note for note in behind.header.notes)
    assert not [note for note in behind.header.notes if "counted" in note]
    assert behind.header.engine_counters["generation_tokens"] == REQUESTS * OUTPUT
    assert behind.header.engine_counters["finished"] == REQUESTS


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_each_api_server_has_its_share_of_the_ceiling(runs: tuple[Run, Run]) -> None:
    plain, behind = runs
    roles = [p.role for p in behind.header.processes if p.role != "helper"]
    assert sorted(roles) == ["client", "engine_core", "front_end", "front_end"]
    assert behind.header.core.active and behind.header.core.parts["front_end"]
    servers, alone = RunAnalysis(behind), RunAnalysis(plain)
    # On a busy host a process may have too few samples: then the figure is None, with a reason.
    if servers.ceiling is None:
        assert "too few samples" in servers.no_ceiling
    else:
        assert len(servers.ceiling.front_ends_us) == 2
        assert servers.ceiling.cpu_us_per_token["front_end"] == max(servers.ceiling.front_ends_us)
    assert alone.ceiling.front_ends_us == () if alone.ceiling else "too few samples" in alone.no_ceiling


def killed_while_running(
    output: Path, title: str, flags: tuple[str, ...]
) -> tuple[Run, KvtuneError, list[int]]:
    """Kill one process of the engine once requests have finished: the run, its error, and who is left."""
    seen = []
    killed: list[int] = []

    def on_event(event: Event) -> None:
        if event.kind == "progress" and event.finished >= 8 and not killed:
            seen.extend(engine_of(output))
            for pid, line in commands(seen).items():
                if title in line and not killed:
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)

    long = setup(*flags, load=LOAD.replace("rounds=3", "rounds=300"))
    done = EngineBench(output).run(long, on_event)
    assert killed and done.error is not None
    return read_run(done.path), done.error, alive(seen)


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("title", "servers"), [("EngineCore", 1), ("EngineCore", 2), ("APIServer", 2), ("api_servers", 2)]
)
def test_a_run_whose_server_is_killed_is_partial_and_leaves_nothing(
    tmp_path: Path, title: str, servers: int
) -> None:
    run, error, left = killed_while_running(tmp_path, title, ("--api-server-count", str(servers)))
    assert run.header.state == "partial" and error.exit_code == 1 and error.message == run.header.why
    assert 8 <= (run.table("requests")["finish"] == "length").sum() < REQUESTS * 100
    assert len(run.table("steps")["t_s"]) > 0 and not left
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(600)
@pytest.mark.parametrize("servers", [1, 2])
def test_no_other_user_can_ask_a_runs_own_server(tmp_path: Path, servers: int) -> None:
    answers: dict[str, int] = {}
    lines: list[str] = []

    def on_event(event: Event) -> None:
        if event.kind == "progress" and not answers:
            lines.extend(commands(engine_of(tmp_path)).values())
            (port,) = {
                words[words.index("--port") + 1] for line in lines if "--port" in (words := line.split())
            }
            for path in ("collective_rpc", "reset_prefix_cache", "v1/completions", "metrics", "health"):
                for method in ("GET", "POST"):
                    answer = httpx.request(method, f"http://127.0.0.1:{port}/{path}", json={"method": "x"})
                    answers[f"{method} {path}"] = answer.status_code

    done = EngineBench(tmp_path).run(setup("--api-server-count", str(servers)), on_event)
    assert done.error is None and set(answers.values()) == {401}
    assert lines and not [line for line in lines if "Bearer" in line or "api-key" in line]


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_flags_that_vllm_serve_refuses_are_named(tmp_path: Path) -> None:
    with pytest.raises(KvtuneError, match=r"vLLM refuses these flags: .*--no-such-flag"):
        EngineBench(tmp_path).run(setup("--api-server-count", "1", "--no-such-flag", "1"))


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_real_engine_can_have_a_server_in_front_too(tmp_path: Path) -> None:
    workload = build("decode:requests=8,prompt=20,output=10", seed=0)
    done = EngineBench(tmp_path).run(
        Setup(
            model="tiny-opt", load=Load.of(workload), engine_args=["--api-server-count", "1"], core="kvtune"
        )
    )
    assert done.error is None and done.run.header.source == "engine"
    assert done.run.table("requests")["output_tokens"].tolist() == [10] * 8
    assert not [note for note in done.run.header.notes if "counted" in note]
