"""Ring files to tables: only the measuring phase, only this run's processes, no records with clock errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtune.lab.engine.culprits import instruments
from kvtune.lab.engine.launch import HostOutcome
from kvtune.lab.engine.rings import RingTables, read_rings, ring_tables
from kvtune.plugin.probe import gc as gc_module
from kvtune.plugin.probe.gc import CollectorProbe
from kvtune.plugin.probe.records import Collection, Copies, Digest, Recomputed, Step
from kvtune.plugin.probe.ring import Ring


def outcome(start_ns: int = 1000, end_ns: int = 10**12) -> HostOutcome:
    return HostOutcome("", 0, start_ns=start_ns, end_ns=end_ns)


def tables(folder: Path, index: dict[int, int], of: HostOutcome | None = None) -> RingTables:
    return ring_tables(read_rings(folder, index), of or outcome())


def collection(start_ns: int, pause_ns: int = 7_000) -> Collection:
    return Collection(2, start_ns, pause_ns, 6_000, 3, 1, 0, 0, -1)


def test_steps_and_collections_of_the_measuring_phase(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring-1.bin", 1 << 16)
    for start in (500, 2000, 4000):
        ring.write(collection(start))
    times = (3000, 9_000, 2_000, 3_000, 1_000, 4_000)
    ring.write(Step(False, 5, *times, 8, 2, 6, 7, 99, 0, 0, 0, 0, 0, 0, preempted=3))
    merged = tables(tmp_path, {os.getpid(): 4}, outcome(end_ns=3500))
    assert merged.gc["t_s"].tolist() == pytest.approx([1e-6]) and merged.gc["process"].tolist() == [4]
    assert (merged.gc["pause_us"][0], merged.gc["cpu_us"][0], merged.gc["collected"][0]) == (7.0, 6.0, 3)
    (row,) = zip(
        *(merged.steps[c].tolist() for c in ("step_us", "scheduled_tokens", "prefill_tokens", "waiting")),
        strict=True,
    )
    assert row == (9.0, 8, 2, 7)
    assert merged.steps["preempted"].tolist() == [3] and merged.gc["line"].tolist() == [0]
    assert merged.lost == {4: 0} and merged.backwards == {}


def test_tokens_computed_twice_are_summed_by_request_and_cause(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring-1.bin", 1 << 16)
    ring.write(Recomputed(7, 500, evicted=1))
    for record in (Recomputed(7, 2000, evicted=32, partial_block=5), Recomputed(7, 2500, evicted=8)):
        ring.write(record)
    ring.write(Recomputed(300_000_000, 2600, not_retained=2, skipped_lookup=9))
    assert tables(tmp_path, {os.getpid(): 4}).computed_twice == {
        "7": {"evicted": 40, "partial_block": 5},
        "300000000": {"not_retained": 2, "skipped_lookup": 9},
    }, "what came before the measuring phase is left out"


def test_a_collection_names_the_line_that_set_it_off(tmp_path: Path) -> None:
    """By its number in the process's lines, counted from 1; the lines that measuring never reached are left out."""
    ring = Ring(tmp_path / "ring-1.bin", 1 << 16)
    for start, line in ((500, 2), (2000, 1), (2500, -1)):
        ring.write(Collection(0, start, 7_000, 6_000, 3, 1, 0, 0, line))
    rings = read_rings(tmp_path, {os.getpid(): 0})
    status = {"pid": os.getpid(), "triggers": [["/a.py", 1], ["/b.py", 2], ["/c.py", 3]]}
    ledger = instruments(tmp_path, rings, {os.getpid(): 0}, [status], outcome()).ledger["0"]
    assert ring_tables(rings, outcome()).gc["line"].tolist() == [2, 0]
    assert ledger.lines == ["/a.py:1", "/b.py:2"]


def test_a_ring_of_a_process_that_is_not_of_this_run_is_left_out(tmp_path: Path) -> None:
    Ring(tmp_path / "ring-1.bin", 1 << 16).write(collection(2000))
    (tmp_path / "ring-2.bin").write_bytes(b"no ring")
    assert not len(tables(tmp_path, {1: 0}).gc["t_s"])


def test_digests_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring-1.bin", 1 << 16)
    for start, value in ((500, 1), (2000, 9), (3000, 4)):
        ring.write(Digest(start, value))
    assert tables(tmp_path, {os.getpid(): 0}).digests == [9, 4]


def test_a_clock_that_goes_backwards_is_counted_and_its_records_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock goes back ten seconds during the second collection; the probe continues."""
    times = iter([5 * 10**9, 5 * 10**9 + 100, 20 * 10**9, 10 * 10**9, 11 * 10**9, 11 * 10**9 + 300])
    monkeypatch.setattr(gc_module, "monotonic_ns", lambda: next(times))
    probe = CollectorProbe(Ring(tmp_path / "ring-1.bin", 1 << 16))
    for _ in range(3):
        for phase in ("start", "stop"):
            probe._call(phase, {"generation": 2, "collected": 0, "uncollectable": 0})
    assert probe.failed == ""
    merged = tables(tmp_path, {os.getpid(): 0})
    assert merged.gc["pause_us"].tolist() == pytest.approx([0.1, 0.3])
    assert merged.backwards == {0: 1}


def test_what_a_tier_copied_is_a_row_of_its_turn(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "ring-1.bin", 1 << 16)
    ring.write(Copies(2000, 1 << 40, 3_000_000, 1 << 33, 4_000, 5, 6_000, 7_000, 8, 9, 10, 11))
    merged = tables(tmp_path, {os.getpid(): 2})
    row = {name: column.tolist() for name, column in merged.copies.items()}
    assert row.pop("t_s") == pytest.approx([1e-6])
    assert row == {
        "process": [2],
        "stored_bytes": [1 << 40],
        "store_us": [3000.0],
        "loaded_bytes": [1 << 33],
        "load_us": [4.0],
        "loads": [5],
        "wait_us": [6.0],
        "longest_wait_us": [7.0],
        "stored_chunks": [8],
        "reused_chunks": [9],
        "evicted_chunks": [10],
        "refused": [11],
    }
