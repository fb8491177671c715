"""kvtune against the real vLLM engine: the whole way from the command line to JSON, run file and page.

Each engine start costs about 25 s of two cores, so runs are shared by the tests of this module.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvtune.engine.plan import Event
from kvtune.engine.profile import Job, Profiled, profile
from kvtune.run.file import read_run
from kvtune.run.types import Run
from kvtune.workload.spec import build

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROUNDS = "rounds:prefixes=15,prefix=4000,suffix=64,output=16,rounds=3"
ROUNDS_ENGINE = (
    "--num-gpu-blocks-override",
    "8000",
    "--block-size",
    "32",
    "--max-num-batched-tokens",
    "2048",
)


@dataclass(frozen=True)
class Ran:
    facts: dict[str, Any]
    run: Run
    stderr: str


def kvtune(*arguments: str, output: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvtune", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=output,
        env={**os.environ, "NO_COLOR": "1"},
    )


def profiled(output: Path, *arguments: str, engine: tuple[str, ...] = ()) -> Ran:
    done = kvtune("profile", *arguments, "--json", "-o", str(output), "--", *engine, output=output)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)  # one object on stdout and nothing else
    return Ran(facts, read_run(Path(facts["run_file"])), done.stderr)


@pytest.fixture(scope="module")
def rounds_stock(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return profiled(
        tmp_path_factory.mktemp("rounds-stock"),
        "tiny-gemma3", "-w", ROUNDS, "--core", "stock",
        engine=ROUNDS_ENGINE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rounds_kvtune(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return profiled(
        tmp_path_factory.mktemp("rounds-kvtune"), "tiny-gemma3", "-w", ROUNDS, engine=ROUNDS_ENGINE
    )


@pytest.fixture(scope="module")
def decode(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return profiled(
        tmp_path_factory.mktemp("decode"),
        "tiny-opt", "-w", "decode:requests=512,prompt=48,output=200",
        engine=("--max-num-seqs", "256"),
    )  # fmt: skip


def hits_by_round(ran: Ran) -> list[int]:
    return [r["hit_tokens"] for r in ran.facts["rounds"]]


def test_stocks_default_hits_at_the_third_visit_only(rounds_stock: Ran) -> None:
    assert hits_by_round(rounds_stock) == [0, 0, 60000]


def test_the_core_hits_from_the_second_visit_on(rounds_kvtune: Ran) -> None:
    assert rounds_kvtune.facts["core"]["name"] == "kvtune"
    assert rounds_kvtune.run.header.core.active, rounds_kvtune.run.header.core.why
    first, second, third = hits_by_round(rounds_kvtune)
    assert first == 0
    assert min(second, third) >= 0.98 * 60000


def test_the_core_answers_as_stock_does(rounds_stock: Ran, rounds_kvtune: Ran) -> None:
    answers = [ran.run.table("requests")["answer_crc"].tolist() for ran in (rounds_stock, rounds_kvtune)]
    assert all(answers[0]) and len(set(answers[0])) > 15
    assert answers[0] == answers[1]
    assert rounds_stock.facts["output_tokens"] == rounds_kvtune.facts["output_tokens"] == 45 * 16
    assert rounds_stock.facts["workload"]["hash"] == rounds_kvtune.facts["workload"]["hash"]


CONTRACT = """
schema source model workload.name workload.params workload.hash core.name core.settings seed
engine.vllm engine.device engine.executor engine.block_size engine.num_blocks engine.settings
python host.cpu host.cores requests prompt_tokens output_tokens wall_s throughput_tok_s
ttft_ms.mean ttft_ms.p50 ttft_ms.p99 itl_ms.mean itl_ms.p50 itl_ms.p99 e2e_ms.mean rounds
prefix_cache.query_tokens prefix_cache.hit_tokens prefix_cache.hit_rate prefix_cache.misses
gc host_us.schedule host_us.update host_us.per_request_step memory valid.timings valid.why
""".split()  # noqa: SIM905


@pytest.mark.parametrize("path", CONTRACT)
def test_the_contracts_fields_are_there(decode: Ran, path: str) -> None:
    value: Any = decode.facts
    for name in path.split("."):
        assert name in value, f"--json has no {path}"
        value = value[name]
    assert value is not None


def test_what_was_asked_for_was_served(decode: Ran) -> None:
    facts = decode.facts
    assert (facts["requests"], facts["prompt_tokens"], facts["output_tokens"]) == (512, 512 * 48, 512 * 200)
    assert facts["engine"]["settings"]["max_num_seqs"] == 256
    assert facts["valid"]["timings"] is True
    cache = facts["prefix_cache"]
    assert cache["hit_tokens"] + sum(cache["misses"].values()) == cache["query_tokens"]


def test_the_front_ends_account_agrees_with_vllms_own(
    decode: Ran, rounds_stock: Ran, rounds_kvtune: Ran
) -> None:
    for ran in (decode, rounds_stock, rounds_kvtune):
        counters = ran.run.header.engine_counters
        assert counters["finished"] == ran.facts["requests"]
        assert counters["generation_tokens"] == ran.facts["output_tokens"]
        assert not [n for n in ran.run.header.notes if "counted" in n]


def test_every_process_has_its_own_instruments(decode: Ran) -> None:
    header = decode.run.header
    assert {"front_end", "engine_core", "worker"} <= {p.role for p in header.processes}
    assert header.probe.level == "light" and not header.probe.disabled and not header.probe.lost_records
    measured = {header.processes[i].role for i in decode.run.table("memory")["process"]}
    assert {"front_end", "engine_core", "worker"} <= measured
    for name in ("front_end", "engine_core", "worker"):
        assert decode.facts["memory"][name] > 100 << 20


def test_every_step_was_seen(decode: Ran) -> None:
    steps = decode.run.table("steps")
    scheduled = int(steps["scheduled_tokens"].sum())
    # Each output token but a request's last is fed back as input.
    assert scheduled == 512 * 48 + 512 * 199
    assert (steps["step_us"] >= steps["schedule_us"] + steps["update_us"]).all()
    assert int(steps["prefill_tokens"].sum()) == 512 * 48


def test_token_times_are_whole_and_in_order(decode: Ran) -> None:
    tokens, requests = decode.run.table("tokens"), decode.run.table("requests")
    assert int(tokens["count"].sum()) == decode.facts["output_tokens"]
    for i in (0, 100, 511):
        times = tokens["t_s"][tokens["request"] == i]
        assert math.isclose(times[0], requests["first_token_s"][i])
        assert (times[1:] >= times[:-1]).all()
        assert requests["sent_s"][i] <= times[0] <= times[-1] <= requests["finished_s"][i]


def test_the_page_is_one_file_without_any_address(decode: Ran) -> None:
    page = Path(decode.facts["page"])
    text = page.read_text()
    assert "tiny-opt" in text and text.lstrip().lower().startswith("<!doctype html>")
    assert page.stat().st_size < 3 << 20


def test_nothing_is_left_in_the_output_folder_but_results(decode: Ran) -> None:
    folder = Path(decode.facts["run_file"]).parent
    assert {p.suffix for p in folder.iterdir()} == {".kvrun", ".html"}


def test_a_prompt_longer_than_the_model_allows_is_refused_before_the_engine_starts(tmp_path: Path) -> None:
    done = kvtune("profile", "tiny-opt", "-w", "prefill:requests=2,prompt=5000,output=8", output=tmp_path)
    assert done.returncode == 2
    assert "max-model-len 4096" in done.stderr and "5000 prompt" in done.stderr
    assert not list((tmp_path / "reports").glob("*.kvrun"))


def test_a_flag_that_vllm_does_not_know_is_named(tmp_path: Path) -> None:
    done = kvtune("profile", "tiny-opt", "--", "--no-such-flag", "3", output=tmp_path)
    assert done.returncode == 2
    assert "--no-such-flag" in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    done = kvtune("profile", "tiny-opt", "--", "--kv-cache-memory-bytes", "900G", output=tmp_path)
    assert done.returncode == 1
    what, next_ = done.stderr.strip().splitlines()[-2:]
    assert "kv cache" in what.lower() or "memory" in what.lower()
    assert next_.strip().startswith("next:")
    assert "Traceback" not in done.stderr


def our_engines() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if "VLLM::" in line or "kvtune.engine.host" in line:
            found.append(process)
    return found


def profile_and_kill(output: Path, role: str) -> Profiled:
    """Kill one process of the engine once some requests have finished."""
    job = Job(
        model="tiny-opt",
        workload=build("decode:requests=4000,prompt=48,output=60,concurrency=64"),
        core="stock",
        output=output,
    )
    before = {p.pid for p in our_engines()}
    killed: list[int] = []

    def on_event(event: Event) -> None:
        if event.kind != "progress" or event.finished < 64 or killed:
            return
        for process in our_engines():
            if process.pid not in before and role in " ".join(process.cmdline()):
                killed.append(process.pid)
                process.kill()

    result = profile(job, on_event)
    assert killed, f"no process {role} was found"
    return result


@pytest.mark.parametrize("role", ["EngineCore", "Worker"])
def test_an_engine_that_is_killed_leaves_a_partial_run(tmp_path: Path, role: str) -> None:
    shared_before = set(Path("/dev/shm").iterdir())
    result = profile_and_kill(tmp_path, role)
    assert result.error is not None and result.error.exit_code == 1
    run = read_run(result.path)
    assert run.header.state == "partial" and run.header.why
    finished = run.table("requests")["finish"] == "length"
    assert 64 <= finished.sum() < 4000
    assert len(run.table("steps")["t_s"]) > 10
    assert len(run.table("memory")["t_s"]) > 0
    assert not [p for p in tmp_path.iterdir() if p.is_dir()]
    assert set(Path("/dev/shm").iterdir()) <= shared_before


def test_ctrl_c_saves_what_was_measured_and_leaves_no_process(tmp_path: Path) -> None:
    shared_before = set(Path("/dev/shm").iterdir())
    before = {p.pid for p in our_engines()}
    command = [sys.executable, "-m", "kvtune", "profile", "tiny-opt", "--core", "stock", "-o", str(tmp_path)]
    command += ["-w", "decode:requests=4000,prompt=48,output=60,concurrency=32", "--json"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    lines: list[str] = []
    assert running.stderr is not None and running.stdout is not None

    def follow() -> None:
        assert running.stderr is not None
        for line in iter(running.stderr.readline, ""):
            lines.append(line)  # noqa: PERF402 - each line must be seen when it comes

    reader = threading.Thread(target=follow)
    reader.start()
    end = time.monotonic() + 400
    while (
        not any("measuring" in line for line in lines) and time.monotonic() < end and running.poll() is None
    ):
        time.sleep(0.1)
    time.sleep(3)
    running.send_signal(signal.SIGINT)
    facts = json.loads(running.stdout.read())
    assert running.wait(timeout=60) == 130
    reader.join()
    running.stdout.close()
    running.stderr.close()
    assert 0 < facts["requests"] < 4000 and facts["state"] == "partial"
    run = read_run(Path(facts["run_file"]))
    assert run.header.state == "partial" and run.header.why == "interrupted"
    assert (run.table("requests")["finish"] == "length").sum() > 0
    assert not [p for p in our_engines() if p.pid not in before]
    assert set(Path("/dev/shm").iterdir()) <= shared_before
    assert "interrupted" in "".join(lines)
