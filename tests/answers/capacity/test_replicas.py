"""How many replicas a load needs, and what a log's own routing cost: from the command line, in the simulator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from kvtune.answers.capacity.document import fewest, shared
from kvtune.answers.capacity.replays import Bench, Window
from kvtune.answers.capacity.replicas import Fewest, Fleets, needed
from kvtune.answers.capacity.result import FleetPoint, Replicas
from kvtune.cli.schema import schema_of
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.lab.sim.simulators import Simulators
from tests.simulator import run

FLAGS = ["--block-size", "32", "--num-gpu-blocks-override", "40", "--max-model-len", "1024"]
SESSIONS, TURNS = 4, 6


def log(folder: Path, *, routed: bool) -> Path:
    """Write four conversations at once, a turn every two seconds, that grow by 72 tokens a turn.

    `routed`: by turns to one of two replicas, which is the worst that a router can do.
    """
    rows = []
    for turn in range(TURNS):
        for session in range(SESSIONS):
            ids = [1000 * (session + 1) + i for i in range(128 + 72 * turn)]
            at = 1_000_000.0 + 2.0 * turn + 0.1 * session
            row = {"prompt": ids, "answer": [7] * 8, "t0": at, "t1": at + 0.5}
            rows.append(row | ({"replica": (session + turn) % 2} if routed else {}))
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.full
@pytest.mark.vllm
def test_a_log_at_its_own_times_needs_as_many_replicas_as_keep_its_hits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["-w", f"requests:path={log(tmp_path, routed=False)},hours=0.01"]
    words = ["capacity", "tiny-llama", *load, "--seeds", "2", "--no-remedies", "--json"]
    assert run([*words, "--replicas-up-to", "4", "--router", "session", "--", *FLAGS]) == 0
    told = json.loads(capsys.readouterr().out)
    Draft202012Validator(schema_of("capacity")).validate(told)
    replicas = told["replicas"]
    assert (replicas["router"], replicas["sessions"], replicas["why_not"]) == ("session", 0, "")
    need = replicas["by_seed"]
    by_count = {point["replicas"]: point for point in replicas["tried"]}
    assert need == [next(n for n, point in sorted(by_count.items()) if point["enough"])] and need[0] > 1
    assert not by_count[1]["enough"] and by_count[1]["kept"] < 0.9 <= by_count[need[0]]["kept"]
    assert len(by_count[need[0]]["hit_rates"]) == need[0]


@pytest.mark.full
@pytest.mark.vllm
def test_sessions_at_once_have_an_answer_for_each_seed() -> None:
    spec = "agents:context=300,tools=30,output=20,turns=6,think=2,different=40,longest=900,max_think=20"
    setup = Setup(model="tiny-llama", engine_args=FLAGS, device=Simulated()).sized()
    with Simulators() as simulators:
        bench = Bench(simulators, spec, 0.02, Window(24.0, 72.0), unit=32)
        told = needed(Fleets(2, "least-busy", 6), bench, setup, keep=0.999, seeds=2)
        assert not told.why_not and len(told.by_seed) == 2
        assert {point.seed for point in told.tried if point.replicas == 1} == {0, 1}
        bench = Bench(
            simulators,
            spec.replace("context=300", "context=3000").replace("longest=900", "longest=0"),
            0.02,
            bench.window,
            unit=32,
        )
        long = needed(Fleets(2, "session", 2), bench, setup, keep=0.9, seeds=3)
    assert not long.by_seed and "exceed max-model-len 1024" in long.why_not


@pytest.mark.vllm
def test_a_log_is_replayed_as_it_was_routed_and_the_regret_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["-w", f"requests:path={log(tmp_path, routed=True)}"]
    words = ["profile", "tiny-llama", "--on", "sim", *load, "--core", "stock", "--tries", "0"]
    assert run([*words, "--json", "-o", str(tmp_path / "a"), "--", *FLAGS]) == 0
    fleet = json.loads(capsys.readouterr().out)["fleet"]
    assert fleet["router"] == "as routed" and [one["requests"] for one in fleet["replicas"]] == [12, 12]
    others = {one["router"]: one["hit_tokens"] for one in fleet["others"]}
    assert set(others) == {"round-robin", "session", "least-busy", "prefix", "one cache for all"}
    hit = sum(one["hit_tokens"] for one in fleet["replicas"])
    assert others["session"] > hit and others["one cache for all"] >= others["session"]
    (made,) = (tmp_path / "a").glob("*.kvrun")
    assert run(["report", str(made), "--console"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "as routed; " in said and "one cache for all" in said


@given(st.integers(1, 40), st.integers(1, 32), st.integers(0, 32))
def test_the_fewest_are_found_with_few_replays(enough: int, most: int, usual: int) -> None:
    search = Fewest(most)
    replayed: list[int] = []
    while not search.is_found:
        replayed.append(search.next(min(usual, most)))
        search.add(replayed[-1], replayed[-1] >= enough)
    assert search.high == (enough if enough <= most else 0)
    assert len(replayed) == len(set(replayed)) <= 11 and max(replayed) <= most
    if usual == enough <= most:
        assert replayed == [usual, usual - 1][: usual if usual < 2 else 2]


def test_the_fewest_are_said_by_seed() -> None:
    def told(by_seed: list[int], sessions: int = 40) -> str:
        return fewest(Replicas(router="session", sessions=sessions, most=8, by_seed=by_seed, tried=[]))

    assert told([2, 3]) == "40 sessions need 2 to 3 replicas (session)"
    assert told([1], 0) == "this load as it is needs 1 replica (session)"
    assert told([0, 8]) == "40 sessions need 8 to over 8 replicas (session)"


def test_each_number_of_replicas_says_whether_it_is_enough() -> None:
    points = [
        FleetPoint(replicas=n, seed=seed, enough=enough, kept=kept, hit_rate=0.5, met=0.8, balance=1.5, hit_rates=[])
        for n, seed, enough, kept in ((1, 0, False, 0.5), (2, 0, True, 0.95), (1, 1, False, 0.6), (2, 1, False, 0.8))
    ]  # fmt: skip
    of = Replicas(router="prefix", sessions=9, most=2, by_seed=[2, 0], tried=points)
    lines = list(shared(of))
    assert lines[1:] == [
        "1: 50–60 % of the hits kept, 80 % of the requests within limits: not enough",
        "2: 80–95 % of the hits kept, 80 % of the requests within limits, the busiest computes 1.50x the mean: "
        "enough with some seeds",
    ]
