"""A bounded, crash-proof log: fixed-size records in a memory-mapped file, one file per process.

The writer runs inside vLLM's processes (any thread, also inside a collector callback): one `pack_into`, no lock.
Each record ends with its own sequence number, so a reader drops torn records and counts overwritten ones.
`records.py` has the kinds of records.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvtune.plugin.probe.records import BODY, KINDS, AnyRecord, Record

MAGIC = b"KVTRING2"
HEADER = 4096
RECORD = struct.Struct(f"<B{BODY}sQ")  # the kind, the fields, and the sequence number + 1
SIZE = RECORD.size
DEFAULT_BYTES = 24 << 20
Kind = TypeVar("Kind")
_HEAD = struct.Struct("<8sIIQQ")  # magic, record size, pid, capacity, start of process in ns


class Ring:
    """The writing end. The constructor raises OSError if the disk has no room for the whole file."""

    def __init__(self, path: Path, size_bytes: int = DEFAULT_BYTES) -> None:
        capacity = size_bytes // SIZE
        total = HEADER + capacity * SIZE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # A sparse file on a full disk would kill the engine by SIGBUS at some later record.
            os.posix_fallocate(descriptor, 0, total)
            self._map = mmap.mmap(descriptor, total)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        _HEAD.pack_into(self._map, 0, MAGIC, SIZE, os.getpid(), capacity, time.monotonic_ns())
        self._capacity = capacity
        self._next = itertools.count().__next__  # atomic under the GIL
        self._pack = RECORD.pack_into
        self.path = path

    def write(self, record: Record) -> None:
        n = self._next()
        self._pack(self._map, HEADER + (n % self._capacity) * SIZE, record.kind, record.pack(), n + 1)


@dataclass(frozen=True, slots=True)
class Records:
    """A ring file's content: records in the order written, and how many were overwritten before reading."""

    pid: int
    rows: list[AnyRecord]
    lost: int

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the records of one kind."""
        return [row for row in self.rows if isinstance(row, kind)]


def read_ring(path: Path) -> Records:
    """Read the ring file of a live or dead process. ValueError if it is not a ring file."""
    raw = path.read_bytes()
    if len(raw) < HEADER or raw[:8] != MAGIC:
        raise ValueError(f"{path} is not a ring file")
    _, size, pid, capacity, _ = _HEAD.unpack_from(raw, 0)
    if size != SIZE:
        raise ValueError(f"{path} has records of {size} bytes, this kvtune reads {SIZE}")
    numbered: list[tuple[int, int, bytes]] = []
    slots = memoryview(raw)[HEADER : HEADER + capacity * SIZE]
    for slot, (kind, body, sequence) in enumerate(RECORD.iter_unpack(slots)):
        if sequence and (sequence - 1) % capacity == slot:
            numbered.append((sequence, kind, body))
    numbered.sort()
    written = numbered[-1][0] if numbered else 0
    # A kind that this version does not know is skipped.
    rows = [KINDS[kind].unpack(body) for _, kind, body in numbered if kind in KINDS]
    return Records(pid, rows, max(0, written - len(numbered)))
