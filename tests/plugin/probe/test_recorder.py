"""Recording live traffic: the trace's content, what must not be in it, and the counters for /metrics."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtune.base import scratch as scratch_module
from kvtune.base.scratch import leave
from kvtune.plugin.probe import recorder as recorder_module
from kvtune.plugin.probe.recorder import PAGE, CounterPage, CounterReader, Counters, Recorder
from kvtune.plugin.probe.recording import BLOCK, Line, PrefixHasher, TraceWriter
from kvtune.requests.loads.spec import build


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
        block_hashes=[],
        num_prompt_tokens=len(tokens),
        num_output_tokens=3,
        prefill_stats=SimpleNamespace(num_local_cached_tokens=hits, num_external_cached_tokens=0),
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
    workload = build(f"trace:path={path}")  # in order, though `second` ended first
    a, b = workload.requests
    assert "no answers" in workload.note
    assert [one.id for one in build(f"trace:path={path},limit=1").requests] == ["line-2"]
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


def block_hashes(tokens: list[int], block: int) -> list[bytes]:
    """Chained, as an engine makes them: of full blocks only."""
    result, last = [], b""
    for end in range(block, len(tokens) + 1, block):
        last = hashlib.sha256(last + str(tokens[end - block : end]).encode()).digest()
        result.append(last)
    return result


@pytest.mark.parametrize("block", [0, 16, 128, 512, 544])
@given(st.lists(st.integers(0, 9), max_size=1200), st.integers(0, 1200))
def test_ids_are_equal_where_prefixes_are(block: int, tokens: list[int], at: int) -> None:
    hasher = PrefixHasher(b"salt")
    other = [*tokens[:at], 10, *tokens[at + 1 :]]
    ids, others = (
        hasher.hash_ids(t, block_hashes(t, block) if block else (), block) for t in (tokens, other)
    )
    assert len(ids) == -(-len(tokens) // BLOCK)
    for i, (one, two) in enumerate(zip(ids, others, strict=False)):
        same = tokens[: (i + 1) * BLOCK] == other[: (i + 1) * BLOCK]
        assert (one == two) == same


def test_the_trace_is_bounded(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", most_bytes=500)
    for i in range(50):
        writer.add([Line(float(i), 10, 1, [i])])
    assert (tmp_path / "t").stat().st_size <= 500
    assert writer.written + writer.dropped == 50
    assert writer.dropped


def test_a_request_that_cannot_be_read_does_not_reach_the_engine(tmp_path: Path) -> None:
    scheduler: Any = Scheduler()
    Recorder(tmp_path / "t", None).attach(scheduler)
    scheduler.add_request(SimpleNamespace(request_id="broken", prompt_token_ids=["x"]))
    strange = request("strange", [1])
    strange.prompt_token_ids = ["x"]
    scheduler.add_request(strange)
    assert scheduler._free_request(strange) == "freed"
    assert scheduler.seen == ["+broken", "+strange", "-strange"]


def test_a_disk_that_fills_in_the_middle_of_a_line_leaves_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, write = TraceWriter(tmp_path / "t"), os.write
    monkeypatch.setattr("os.write", lambda descriptor, data: write(descriptor, data[:150]))
    writer.add([Line(float(i), 10, 1, [i]) for i in range(5)])
    monkeypatch.undo()
    whole = (tmp_path / "t").read_text()
    assert whole.endswith("}\n") and [json.loads(line) for line in whole.splitlines()]
    assert writer.written == len(whole.splitlines()) and writer.written + writer.dropped == 5
    assert "full" in writer.why


def test_a_busy_engines_requests_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(recorder_module, "monotonic", lambda: now[0])
    scheduler: Any = Scheduler()
    recorder = Recorder(tmp_path / "t", None)
    recorder.attach(scheduler)
    requests = [request(str(i), [i] * 3) for i in range(6)]
    for r in requests:
        scheduler.add_request(r)
    lines = []
    for r in requests:
        now[0] += 0.03
        scheduler._free_request(r)
        lines.append(len((tmp_path / "t").read_text().splitlines()))
    assert lines == [0, 0, 0, 4, 4, 6], "after a tenth of a second, and when nothing runs any more"
    assert recorder.totals["requests"] == 6


def test_counters_are_served(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    scheduler: Any = Scheduler()
    Recorder(None, tmp_path).attach(scheduler)
    a = request("a", [1, 2, 3], hits=2)
    scheduler.add_request(a)
    scheduler._free_request(a)
    other = CounterPage(tmp_path / f"another-engine{PAGE}")
    other.write({"active": True, "totals": {"prefix_hit_tokens": 5}, "core": {"pins": 1}})
    (told,) = [f for f in CounterReader(tmp_path).collect() if f.name == "kvtune_core_settings"]
    assert told.samples[0].labels == {"settings": "{}"}
    served = {s.name: s.value for f in CounterReader(tmp_path).collect() for s in f.samples}
    assert served["kvtune_prefix_hit_tokens_total"] == 2 + 5
    assert served["kvtune_prefix_query_tokens_total"] == 3
    assert served["kvtune_core_pins_total"] == 1
    assert served["kvtune_core_active"] == 0  # the first one runs without the core
    assert list(CounterReader(tmp_path / "none").collect()) == []


def test_a_page_that_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / f"1{PAGE}"
    page = CounterPage(path)
    page.write({"active": True, "totals": {"requests": 1}, "core": {}})
    page.HEAD.pack_into(page._memory, 0, 3, 10)
    assert CounterPage.read(path) is None
    second: Counters = {"active": True, "totals": {"requests": 2}, "core": {}}
    page.write(second)
    assert CounterPage.read(path) == second


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_vllms_request_has_the_attributes_that_the_recorder_reads(tmp_path: Path) -> None:
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    hasher = get_request_block_hasher(32, hash_fn)

    def made(name: str, tail: int) -> Any:
        options = {"block_hasher": hasher, "sampling_params": SamplingParams(max_tokens=4)}
        return Request(name, prompt_token_ids=[*range(1000), *[tail] * 90], pooling_params=None, **options)

    scheduler: Any = Scheduler()
    scheduler.hash_block_size = 32
    recorder = Recorder(tmp_path / "t.jsonl", None)
    recorder.attach(scheduler)
    for r in (made("a", 1), made("b", 2)):
        scheduler.add_request(r)
        r.prefill_stats.set(1090, 992, 32)
        r.take_prefill_stats()  # as vLLM does with the first token
        r.append_output_token_ids([7, 7])
        scheduler._free_request(r)
    of_pool = {"requests": 2, "prefix_query_tokens": 2180, "prefix_hit_tokens": 1984}
    assert recorder.totals == {**of_pool, "tier_hit_tokens": 64}
    a, b = (json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines())
    assert (a["input_length"], a["output_length"], len(a["hash_ids"])) == (1090, 2, 3)
    assert a["hash_ids"][0] == b["hash_ids"][0]
    assert a["hash_ids"][1] != b["hash_ids"][1]


def test_a_folder_of_the_user_is_not_taken_for_the_counters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be removed with the server. Traffic is recorded nevertheless."""
    monkeypatch.setattr(scratch_module, "MARKING_S", 0.0)
    mine = tmp_path / "glob*dir"
    mine.mkdir()
    (mine / "data").write_text("mine")
    (tmp_path / "glob-other-dir").mkdir()
    assert recorder_module.counted(str(mine)) is None
    assert "name a folder that does not exist" in caplog.text
    assert (mine / "data").read_text() == "mine" and (tmp_path / "glob-other-dir").is_dir()


def test_the_counters_folder_goes_with_its_last_process_and_takes_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "kvtune-serve-*"
    other = tmp_path / "new" / "kvtune-serve-mine"
    lock = recorder_module.use(folder)
    other.mkdir()
    (folder / f"1{PAGE}").touch()
    assert folder.stat().st_mode & 0o777 == 0o700
    leave(folder, lock)
    assert list(folder.parent.iterdir()) == [other]


def test_a_recording_is_its_users_alone_and_no_other_file_is_added_to(tmp_path: Path) -> None:
    path, mine, link = (tmp_path / name for name in ("t.jsonl", "mine.jsonl", "link.jsonl"))
    before = os.umask(0)
    try:
        for number in range(2):
            TraceWriter(path).add([Line(float(number), 10, 1, [1])])
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600 and len(path.read_text().splitlines()) == 2
    mine.write_text('{"mine": 1}')
    link.symlink_to(path)
    for other in (mine, link):
        with pytest.raises(OSError, match=r"no recording|it is a link"):
            TraceWriter(other)
    assert mine.read_text() == '{"mine": 1}' and len(path.read_text().splitlines()) == 2


def test_a_recording_goes_on_after_a_torn_line_and_is_its_users_alone_again(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    writer = TraceWriter(path)
    writer.add([Line(0.0, 10, 1, [1])])
    os.close(writer._descriptor)  # as its process ends
    with path.open("ab") as file:
        file.write(b'{"timestamp":1.0,"input_l')  # a crash in the middle of a line
    path.chmod(0o644)
    TraceWriter(path).add([Line(2.0, 10, 1, [2])])
    assert [json.loads(line)["timestamp"] for line in path.read_text().splitlines()] == [0.0, 2.0]
    assert path.stat().st_mode & 0o777 == 0o600
