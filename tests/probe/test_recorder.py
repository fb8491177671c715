"""Recording live traffic: what the trace holds and what it cannot hold; counters for /metrics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.probe.recorder import CounterReader, Recorder
from kvtune.workload.recording import BLOCK, PrefixHasher, TraceWriter
from kvtune.workload.spec import build


class Scheduler:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def add_request(self, request: Any) -> None:
        self.seen.append(f"+{request.request_id}")

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> str:
        self.seen.append(f"-{request.request_id}")
        return "freed"


def request(name: str, tokens: list[int], hits: int = 0) -> Any:
    return SimpleNamespace(
        request_id=name,
        prompt_token_ids=tokens,
        num_prompt_tokens=len(tokens),
        num_output_tokens=3,
        num_cached_tokens=hits,
    )


def test_recorded_traffic_is_a_workload_with_the_same_sharing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    scheduler: Any = Scheduler()
    Recorder(path, tmp_path).attach(scheduler)
    shared = list(range(2 * BLOCK))
    first, second = request("a", [*shared, 1]), request("b", [*shared, 2, 2], hits=1024)
    scheduler.add_request(first)
    scheduler.add_request(second)
    assert scheduler._free_request(second) == "freed"
    scheduler._free_request(first, delay_free_blocks=True)
    workload = build(f"trace:path={path},sort=1")
    a, b = workload.requests
    assert [a.prompt_tokens, b.prompt_tokens] == [2 * BLOCK + 1, 2 * BLOCK + 2]
    assert a.prompt[:2] == b.prompt[:2]
    assert a.prompt[2].stream != b.prompt[2].stream
    assert scheduler.seen == ["+a", "+b", "-b", "-a"]


def test_no_token_and_no_salt_reach_the_file(tmp_path: Path) -> None:
    tokens = [4_000_000_000 + i for i in range(600)]
    for name in ("a", "b"):
        scheduler: Any = Scheduler()
        Recorder(tmp_path / name, None).attach(scheduler)
        r = request("x", tokens)
        scheduler.add_request(r)
        scheduler._free_request(r)
    a, b = ((tmp_path / name).read_text() for name in ("a", "b"))
    assert "4000000" not in a
    assert a.split("hash_ids")[1] != b.split("hash_ids")[1]  # another salt


@given(st.lists(st.integers(0, 9), max_size=1200), st.integers(0, 1200))
def test_ids_are_equal_where_prefixes_are(tokens: list[int], at: int) -> None:
    hasher = PrefixHasher(b"salt")
    other = [*tokens[:at], 10, *tokens[at + 1 :]]
    ids, others = hasher.hash_ids(tokens), hasher.hash_ids(other)
    assert len(ids) == -(-len(tokens) // BLOCK)
    for i, (one, two) in enumerate(zip(ids, others, strict=False)):
        same = tokens[: (i + 1) * BLOCK] == other[: (i + 1) * BLOCK]
        assert (one == two) == same


def test_the_trace_is_bounded(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", most_bytes=500)
    for i in range(50):
        writer.add(float(i), 10, 1, [i])
    assert (tmp_path / "t").stat().st_size <= 500
    assert writer.written + writer.dropped == 50
    assert writer.dropped


def test_a_full_disk_ends_the_recording_only() -> None:
    writer = TraceWriter(Path("/dev/full"))
    writer.add(0.0, 1, 1, [1])
    assert "No space" in writer.why
    assert writer.dropped == 1


def test_a_request_that_cannot_be_read_does_not_reach_the_engine(tmp_path: Path) -> None:
    scheduler: Any = Scheduler()
    Recorder(tmp_path / "t", None).attach(scheduler)
    scheduler.add_request(SimpleNamespace(request_id="broken", prompt_token_ids=["x"]))
    assert scheduler.seen == ["+broken"]


def test_counters_are_served(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    scheduler: Any = Scheduler()
    recorder = Recorder(None, tmp_path)
    recorder.attach(scheduler)
    recorder._due = 0.0
    scheduler._free_request(request("a", [1, 2, 3], hits=2))
    told = {s.name: s.value for f in CounterReader(tmp_path / "counters.json").collect() for s in f.samples}
    assert told["kvtune_prefix_hit_tokens_total"] == 2
    assert told["kvtune_prefix_query_tokens_total"] == 3
    assert list(CounterReader(tmp_path / "none.json").collect()) == []
