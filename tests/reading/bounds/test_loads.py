from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.reading.bounds.loads import of_sessions, of_workload, reuse_distances
from kvtune.reading.bounds.paths import paths_of
from kvtune.reading.bounds.policies import infinite, lru
from kvtune.requests.loads.spec import build, session_load
from kvtune.requests.types import Request, Span, Workload
from tests.recorded_sessions import unpacked
from tests.simulator import run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpacked(tmp_path_factory.mktemp("sessions"))


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=30), st.integers(1, 30))
def test_an_lru_cache_of_a_reuse_distance_hits_and_a_smaller_one_does_not(
    used: list[tuple[int, int]], nodes: int
) -> None:
    """Whole prompts in turn: the nodes whose distance a cache has room for are the nodes that it hits."""
    requests = [Request(str(at), (Span(one, 0, 4 * size),), 1) for at, (one, size) in enumerate(used)]
    paths = paths_of(Workload("made", "made", {}, 0, requests, ""), 4, answers=False)
    reused = [one for each in reuse_distances(paths) for one in each]
    if nodes >= max(paths.nodes):
        assert 4 * sum(min(hit, max(0, nodes - others)) for others, hit in reused) == sum(lru(paths, nodes))
    assert 4 * sum(hit for _, hit in reused) == sum(infinite(paths))


def test_recorded_sessions_are_described(recorded: Path) -> None:
    facts = of_sessions(session_load(f"trace:path={recorded}"), "weka", 16)
    of = facts.sessions
    assert of is not None and of.pauses is not None and of.reuse_s is not None
    assert (facts.requests, facts.prompt.total, of.sessions, of.subagents, of.joins) == (
        1015,
        59_614_536,
        31,
        9,
        3,
    )
    assert (of.pauses.p50, of.pauses.p90, of.pauses.p99) == (8.0, 130.0, 2560.0)
    assert 0.94 < facts.infinite < 0.95
    assert of.cut_turns == pytest.approx(0.036, abs=0.001)


def test_sessions_and_their_requests_agree_on_what_an_infinite_cache_hits(recorded: Path) -> None:
    spec = f"trace:path={recorded},share=yes"
    alone, requests = of_sessions(session_load(spec), spec, 16), of_workload(build(spec), 16)
    assert alone.infinite == pytest.approx(requests.infinite, abs=0.002)
    assert alone.prompt == requests.prompt and alone.output == requests.output


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert run(["trace", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_any_workload_is_described(
    capsys: pytest.CaptureFixture[str], recorded: Path, tmp_path: Path
) -> None:
    zipf = answer(capsys, "-w", "zipf:requests=50")
    assert zipf["requests"] == 50 and zipf["sessions"] is None and zipf["reuse_tokens"]["p50"] > 0
    played = answer(capsys, "-w", f"trace:path={recorded},sessions=3,hours=0.2")
    assert played["sessions"]["sessions"] == 31 and played["reuse_tokens"]["most"] > 10_000
    burst = tmp_path / "burst.csv"
    burst.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n1,m,20,5,25,x\n")
    assert any("no hash ids" in note for note in answer(capsys, "-w", f"trace:path={burst}")["notes"])
    assert run(["trace", "-w", f"trace:path={recorded}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "sessions 31;" in said and "cache hits 94.4" in said and "sub-agents 9;" in said
    assert run(["trace"]) == 2
