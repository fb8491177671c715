"""`kvtune profile --on sim`: a recorded engine without its machine, odd traces, bad input in two lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvtune.base.errors import KvtuneError
from kvtune.data.platforms import device
from kvtune.data.run.file import read_run
from kvtune.data.run.types import Run
from kvtune.lab.device.cost import NOMINAL, StepCost
from kvtune.lab.setup.like import cost_of
from kvtune.lab.setup.setup import Load, Setup
from kvtune.lab.sim.simulators import Simulators
from kvtune.requests.loads.spec import build
from kvtune.requests.types import Workload
from tests.simulator import on
from tests.simulator import run as kvtune

HERE = Path(__file__).parents[2]
GOLDEN = HERE / "golden"
GALLERY = HERE.parent / "reports" / "gallery"
FLAGS = ["--num-gpu-blocks-override", "300", "--block-size", "32", "--max-model-len", "4096"]


def replayed(simulators: Simulators, workload: Workload, *wanted: Any) -> list[Run]:
    by_name: dict[int, Run] = {}
    for number, outcome in simulators.run(on(workload, list(wanted))):
        assert isinstance(outcome, Run), outcome
        by_name[number] = outcome
    return [by_name[number] for number in range(len(wanted))]


@pytest.mark.full
@pytest.mark.vllm
@pytest.mark.parametrize("core", ["stock", "kvtune"])
def test_a_recorded_engine_is_simulated_from_its_run_file(simulators: Simulators, core: str) -> None:
    """Runs of the real engine, as published: every request's hits come out again, and the times are a prediction."""
    recorded = read_run(GALLERY / f"rounds-{core}.kvrun")
    info = recorded.header.workload
    work = build(info.spec, seed=info.seed)
    job = Setup(
        model="tiny-gemma3",
        load=Load.of(work),
        core="stock" if core == "stock" else "kvtune",
        core_settings={},  # the run names settings that are gone; the defaults hit the same
    )
    exact, jumped = replayed(
        simulators, work, *(job.replayed(shortcuts=on).like(recorded).sized() for on in (False, True))
    )
    for run in (exact, jumped):
        np.testing.assert_array_equal(
            run.table("requests")["hit_tokens"], recorded.table("requests")["hit_tokens"]
        )
    assert exact.header.engine.num_blocks == recorded.header.engine.num_blocks
    known = recorded.header.engine.groups  # recorded before groups had the bytes of all their layers
    again = [
        {name: group[name] for name in one}
        for one, group in zip(known, exact.header.engine.groups, strict=True)
    ]
    assert again == known and exact.header.engine.pool_bytes == recorded.header.engine.pool_bytes
    assert exact.header.valid.why.startswith("predicted")
    assert exact.header.extra.step_cost["source"] == recorded.header.started_at


@pytest.mark.full
@pytest.mark.vllm
def test_a_devices_memory_sizes_the_pool_beside_the_weights(simulators: Simulators) -> None:
    """OPT-125m has 125,239,296 parameters of two bytes; a block of 16 tokens is 24 half matrices of 16 x 768."""
    work = build("decode:requests=1,prompt=8,output=2", seed=0)
    job = Setup(model="opt-125m", load=Load.of(work), core="stock", platform=device("2GiB"))
    (run,) = replayed(simulators, work, job.sized())
    room = int(2 * 2**30 * 0.92) - 2 * 125_239_296
    assert run.header.engine.num_blocks == room // (12 * 2 * 16 * 768 * 2)


@pytest.mark.vllm
def test_the_block_size_of_another_device_is_kept(simulators: Simulators) -> None:
    """What a GPU engine would have captured: blocks of 16 tokens, which no CPU backend takes; steps sent ahead."""
    work = build("zipf:prefixes=5,prefix=210,requests=20,output=8", seed=0)
    job = Setup(model="tiny-llama", load=Load.of(work), core="stock", engine_args=list(FLAGS))
    here = replayed(simulators, work, job.sized())[0]
    captured = json.loads(
        json.dumps(here.header.engine.kv_specs).replace('"block_size": 32', '"block_size": 16')
    )
    engine = msgspec.structs.replace(
        here.header.engine, kv_specs=captured, args=[], device="cuda", async_scheduling=True
    )
    there = Run(msgspec.structs.replace(here.header, engine=engine), here.tables)
    again = replayed(
        simulators,
        work,
        Setup(model="tiny-llama", load=Load.of(work), core="stock").like(there).sized(),
    )[0]
    assert (again.header.engine.block_size, again.header.engine.num_blocks) == (16, 300)
    assert again.header.engine.async_scheduling and again.header.extra.sim.batch_queue
    hits = [run.table("requests")["hit_tokens"].sum() for run in (here, again)]
    assert hits[1] > hits[0] > 0  # 210 tokens are 6 blocks of 32 and 13 of 16


def test_costs_come_from_the_run_or_are_nominal() -> None:
    """A run with too few steps has no cost; a simulated one is repeated with the cost that it ran with."""
    recorded = read_run(GALLERY / "rounds-stock.kvrun")
    assert cost_of(recorded).fitted
    steps = {name: column[:5] for name, column in recorded.table("steps").items()}
    assert cost_of(Run(recorded.header, {**recorded.tables, "steps": steps})) == NOMINAL
    known = StepCost(step_us=7.0, prefill_token_us=1.0, decode_us=2.0, kv_token_us=0.5)
    assert cost_of(recorded.with_extra(step_cost=msgspec.to_builtins(known))) == known


def test_a_run_without_kv_specs_cannot_be_simulated() -> None:
    with pytest.raises(KvtuneError, match="no KV specs"):
        Setup(model="tiny-gemma3").like(read_run(GOLDEN / "schema1-bare.kvrun"))


def trace(folder: Path, rows: list[tuple[int, int, int, list[int]]]) -> Workload:
    path = folder / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return build(f"trace:path={path}", seed=0)


@pytest.mark.vllm
@pytest.mark.parametrize("shortcuts", [False, True])
def test_traces_with_long_gaps_and_repeated_lines_replay(
    simulators: Simulators, tmp_path: Path, shortcuts: bool
) -> None:
    """Hours without requests, the same line again (at the same moment, too), answers of one token."""
    hour = 3_600_000
    rows = [(0, 600, 1, [1, 2]), (0, 600, 1, [1, 2]), (0, 600, 40, [1, 2]), (9 * hour, 600, 40, [1, 2])]
    rows += [(9 * hour + 1, 1, 1, [7])]
    work = trace(tmp_path, rows)
    job = Setup(model="tiny-llama", load=Load.of(work), core="stock", engine_args=list(FLAGS))
    run = replayed(simulators, work, job.replayed(shortcuts=shortcuts).sized())[0]
    requests = run.table("requests")
    assert run.header.state == "complete" and run.header.wall_s > 9 * 3600
    assert requests["output_tokens"].tolist() == [1, 1, 40, 40, 1]
    assert requests["hit_tokens"].tolist() == [0, 576, 576, 576, 0]  # found as soon as they are handed out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--on", "gpu"], "--on must be engine, host or sim, not 'gpu'"),
        (["--like", str(GALLERY / "rounds-stock.kvrun")], "--like is read only with --on sim"),
        (["--step-us", "8"], "--step-us is read only with --on host"),
        (["--on", "host", "--like", str(GOLDEN / "schema1-bare.kvrun")], "no KV specs"),
        (["--on", "sim", "--like", "/no/such.kvrun"], "/no/such.kvrun"),
        (["--on", "sim", "--like", str(GOLDEN / "schema1-bare.kvrun")], "no KV specs"),
        (["--on", "sim", "--stacks"], "--stacks is read only with --on engine"),
        (["--on", "sim", "--repeat", "2"], "--repeat is read only with --on engine"),
        (["--replicas", "2"], "--replicas is read only with --on sim"),
        (["--on", "host", "--router", "session"], "--router is read only with --on sim"),
        (["--on", "sim", "--router", "session"], "sends requests to one of several engines"),
        (["--on", "sim", "--replicas", "2", "--router", "sesion"], "sesion"),
        (["--on", "sim", "--replicas", "65"], "65"),
    ],
)
def test_bad_input_is_two_lines(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvtune(["profile", "tiny-gemma3", "-w", "rounds", "-o", str(tmp_path), *arguments]) in (1, 2)
    out, err = capsys.readouterr()
    what, next_ = err.splitlines()[-2:]
    assert not out and says in what and next_.startswith("  next: ")


@pytest.mark.full
@pytest.mark.vllm
def test_a_log_is_replayed_as_it_was_routed_beside_other_routers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four conversations whose turns alternate between two engines: each turn's prefix is on the other one."""
    pytest.importorskip("vllm", reason="needs vLLM")
    log, now = tmp_path / "log.jsonl", 1_764_100_000.0
    chats = [[number] * 640 for number in range(4)]
    lines = []
    for turn in range(4):
        for number, chat in enumerate(chats):
            row = {
                "prompt": list(chat),
                "answer": [9] * 8,
                "t0": now,
                "t1": now + 0.5,
                "replica": f"pod-{turn % 2}",
            }
            lines.append(json.dumps(row))
            chat += [9] * 8 + [number] * 64
            now += 1.0
    log.write_text("\n".join(lines))
    asked = ["profile", "tiny-llama", "--on", "sim", "-w", f"requests:path={log}", "-o", str(tmp_path)]
    assert kvtune([*asked, "--tries", "0", "--json", "--", *FLAGS]) == 0
    facts = json.loads(capsys.readouterr().out)
    fleet, hits = facts["fleet"], facts["prefix_cache"]["hit_tokens"]
    assert fleet["router"] == "as routed" and [one["requests"] for one in fleet["replicas"]] == [8, 8]
    assert sum(one["hit_tokens"] for one in fleet["replicas"]) == hits
    by_router = {one["router"]: one["hit_tokens"] for one in fleet["others"]}
    assert set(by_router) == {"round-robin", "session", "least-busy", "prefix", "one cache for all"}
    assert by_router["session"] == by_router["prefix"] == by_router["one cache for all"] > hits
    assert "Replicas" in Path(facts["page"]).read_text()
    assert read_run(Path(facts["run_file"])).header.extra.fleet.router == "given"
    assert kvtune([*asked, "--tries", "0", "--json", "--router", "session", "--", *FLAGS]) == 0
    assert json.loads(capsys.readouterr().out)["prefix_cache"]["hit_tokens"] == by_router["session"]
    explained = [
        "explain-log",
        str(log),
        "--model",
        "tiny-llama",
        "--tries",
        "0",
        "--json",
    ]
    assert kvtune([*explained, "--", *FLAGS]) == 0
    cache = json.loads(capsys.readouterr().out)["prefix_cache"]
    assert cache["hit_tokens"] == hits, "explain-log replays the engines of the log, too"
    assert cache["query_tokens"] == hits + sum(cache["misses"].values())


@pytest.mark.vllm
def test_the_command_writes_a_run_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    spec = "rounds:prefixes=3,prefix=300,suffix=20,output=4,rounds=2"
    argv = [
        "profile",
        "tiny-llama",
        "--on",
        "sim",
        "-w",
        spec,
        "-o",
        str(tmp_path),
        "--json",
    ]
    assert kvtune([*argv, "--", *FLAGS]) == 0
    facts = json.loads(capsys.readouterr().out)
    run = read_run(Path(facts["run_file"]))
    assert Path(facts["page"]).exists()
    assert run.header.source == "sim" and run.header.extra.sim.jumped_steps > 0
    assert run.table("requests")["hit_tokens"].sum() == 3 * 288
