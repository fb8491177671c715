"""When the front end took the tokens of each step: kept by the stat logger, a table of the run."""

from __future__ import annotations

from pathlib import Path
from time import monotonic_ns
from types import SimpleNamespace

import pytest

from kvtune.lab.engine.launch import HostOutcome
from kvtune.lab.engine.messages import RECEIPTS_FILE
from kvtune.lab.engine.rings import receipts_table
from kvtune.lab.engine.vllm_counts import VllmCounts

MESSAGE = SimpleNamespace(num_generation_tokens=2, finished_requests=[])


def test_messages_with_tokens_are_receipts_and_each_is_written_once(tmp_path: Path) -> None:
    counts = VllmCounts()
    counts.record(None, MESSAGE)
    counts.reset()
    start = monotonic_ns()
    for messages in (1, 0, 2):
        for _ in range(messages):
            counts.record(None, MESSAGE)
        counts.record(None, None)
        counts.write_receipts(tmp_path / RECEIPTS_FILE)
    run = HostOutcome("", 0, start_ns=start, end_ns=monotonic_ns())
    times = receipts_table(tmp_path, run)["t_s"]
    assert len(times) == 3 and 0 <= times[0] <= times[1] <= times[2]
    later = HostOutcome("", 0, start_ns=run.end_ns + 1, end_ns=run.end_ns + 2)
    assert not len(receipts_table(tmp_path, later)["t_s"])


def test_a_file_that_ends_within_a_number_is_read_up_to_it(tmp_path: Path) -> None:
    (tmp_path / RECEIPTS_FILE).write_bytes((1_500_000_000).to_bytes(8, "little") + b"\x01\x02")
    run = HostOutcome("", 0, start_ns=1_000_000_000, end_ns=2_000_000_000)
    assert receipts_table(tmp_path, run)["t_s"] == pytest.approx([0.5])
    assert not len(receipts_table(tmp_path / "none", run)["t_s"])


def test_a_vllm_that_does_not_count_preemptions_by_request_is_recorded_without_them() -> None:
    counts = VllmCounts()
    done = {"num_prompt_tokens": 8, "e2e_latency": 0.5, "request_id": "a"}
    for finished in (SimpleNamespace(**done), SimpleNamespace(**done, num_preemptions=2)):
        counts.record(None, SimpleNamespace(num_generation_tokens=1, finished_requests=[finished]))
    assert counts.counters["finished"] == 2 and counts.preemptions == {"a": 2}
