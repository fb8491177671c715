"""The ring returns records in order and drops torn and overwritten ones; a full disk is an OSError."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from struct import Struct
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtune.plugin.probe.records import Collection, Digest, PoolChange, Record, Step
from kvtune.plugin.probe.ring import HEADER, RECORD, SIZE, Ring, read_ring


def test_records_come_back_in_order(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "r", HEADER + 100 * SIZE)
    for i in range(50):
        ring.write(Digest(i * 10**9, -i))
    records = read_ring(tmp_path / "r")
    assert records.pid == os.getpid()
    assert records.lost == 0
    assert records.rows == [Digest(i * 10**9, -i) for i in range(50)]


HALF = st.integers(0, (1 << 31) - 1)
WHOLE = st.integers(-(1 << 63), (1 << 63) - 1)
OBJECTS = st.integers(-(1 << 31) + 1, (1 << 31) - 1)
TIERS = st.tuples(*[WHOLE] * 6)
RECORDS: st.SearchStrategy[Record] = st.one_of(
    st.builds(Digest, WHOLE, WHOLE),
    st.builds(PoolChange, HALF, WHOLE, TIERS),
    st.builds(Collection, st.integers(0, 2), *[WHOLE] * 8),
    st.builds(
        Step,
        st.booleans(),
        HALF,
        *[WHOLE] * 6,
        *[HALF] * 5,
        WHOLE,
        HALF,
        *[OBJECTS] * 4,
        st.integers(0, (1 << 15) - 1),
        *[WHOLE] * 2,
    ),
)


@settings(deadline=None)
@given(record=RECORDS)
def test_every_field_of_every_kind_comes_back(
    tmp_path_factory: pytest.TempPathFactory, record: Record
) -> None:
    path = tmp_path_factory.mktemp("ring") / "r"
    Ring(path, SIZE).write(record)
    assert read_ring(path).rows == [record]


def test_fewer_queues_than_a_record_holds_are_filled_up_with_zeros(tmp_path: Path) -> None:
    Ring(tmp_path / "r", SIZE).write(PoolChange(7, 1, (3, 1)))
    assert read_ring(tmp_path / "r").rows == [PoolChange(7, 1, (3, 1, 0, 0, 0, 0))]


def test_a_kind_that_this_version_does_not_know_is_skipped_and_not_lost(tmp_path: Path) -> None:
    class Newer(Record, frozen=True):
        kind: ClassVar = 99
        layout: ClassVar = Struct("<")

    ring = Ring(tmp_path / "r", 4 * SIZE)
    ring.write(Newer())
    ring.write(Digest(1, 2))
    records = read_ring(tmp_path / "r")
    assert records.rows == [Digest(1, 2)] and records.lost == 0


@settings(deadline=None)
@given(capacity=st.integers(1, 40), written=st.integers(0, 150))
def test_a_full_ring_keeps_the_newest_and_counts_the_rest(
    tmp_path_factory: pytest.TempPathFactory, capacity: int, written: int
) -> None:
    path = tmp_path_factory.mktemp("ring") / "r"
    ring = Ring(path, capacity * SIZE)
    for i in range(written):
        ring.write(Digest(0, i))
    records = read_ring(path)
    kept = min(capacity, written)
    assert records.rows == [Digest(0, i) for i in range(written - kept, written)]
    assert records.lost == written - kept


def test_a_torn_record_is_left_out(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "r", 10 * SIZE)
    for i in range(5):
        ring.write(Digest(0, i))
    with (tmp_path / "r").open(
        "r+b"
    ) as file:  # the last record, killed before its sequence number was written
        file.seek(HEADER + 4 * SIZE + RECORD.size - 8)
        file.write(bytes(8))
    records = read_ring(tmp_path / "r")
    assert records.rows == [Digest(0, i) for i in range(4)]


def test_threads_never_share_a_slot(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "r", 8000 * SIZE)

    def write(thread: int) -> None:
        for i in range(1500):
            ring.write(Digest(thread, i))

    threads = [threading.Thread(target=write, args=(t,)) for t in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    records = read_ring(tmp_path / "r")
    assert len(records.rows) == 6000 and records.lost == 0
    for thread in range(4):
        assert [row for row in records.rows if row.start_ns == thread] == [
            Digest(thread, i) for i in range(1500)
        ]


WRITER = """
import sys
from pathlib import Path
from kvtune.plugin.probe.records import Digest
from kvtune.plugin.probe.ring import Ring
ring = Ring(Path(sys.argv[1]))
i = 0
while True:
    ring.write(Digest(i, 0))
    i += 1
    if i == 1000:
        print("ready", flush=True)
"""


def test_nothing_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "r"
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    records = read_ring(path)
    values = [row.start_ns for row in records.rows]
    assert len(values) + records.lost >= 1000
    assert values == list(range(values[0], values[0] + len(values)))


LIMITED = """
import resource, signal, sys
from pathlib import Path
from kvtune.plugin.probe.ring import Ring
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    Ring(Path(sys.argv[1]), 8 << 20)
except OSError as error:
    print("refused", error.errno)
"""


def test_a_file_without_room_on_the_disk_is_refused_before_any_record(tmp_path: Path) -> None:
    path = tmp_path / "r"
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("refused")
    assert not path.exists()


@pytest.mark.parametrize("content", [b"", b"not a ring", b"KVTRING0" + bytes(5000)])
def test_a_file_that_is_not_a_ring_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(ValueError, match="r is not a ring file"):
        read_ring(tmp_path / "r")
