"""The collector probe records every collection once; its failures never reach the program."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic_ns

import pytest

from kvtune.plugin.probe.gc import CollectorProbe
from kvtune.plugin.probe.records import Collection
from kvtune.plugin.probe.ring import Ring, read_ring


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[tuple[CollectorProbe, Path]]:
    path = tmp_path / "ring"
    probe = CollectorProbe(Ring(path, 1 << 20))
    was_enabled = gc.isenabled()
    gc.disable()  # only the collections that a test asks for
    probe.install()
    yield probe, path
    probe.remove()
    if was_enabled:
        gc.enable()


def test_one_record_per_collection(installed: tuple[CollectorProbe, Path]) -> None:
    _, path = installed
    before = monotonic_ns()
    for generation in (0, 1, 2):
        gc.collect(generation)
    after = monotonic_ns()
    records = read_ring(path)
    rows = records.of(Collection)
    assert len(records.rows) == 3 and [row.generation for row in rows] == [0, 1, 2]
    for row in rows:
        assert before <= row.start_ns and row.pause_ns > 0 and row.start_ns + row.pause_ns <= after


def test_what_was_collected_is_counted(installed: tuple[CollectorProbe, Path]) -> None:
    _, path = installed
    gc.collect()
    for _ in range(100):
        loop: list[object] = []
        loop.append(loop)
    del loop
    gc.collect()
    assert read_ring(path).of(Collection)[-1].collected >= 100


def test_collections_on_other_threads_are_recorded(installed: tuple[CollectorProbe, Path]) -> None:
    _, path = installed
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    assert read_ring(path).of(Collection)[-1].thread != threading.get_ident()


class Broken:
    def write(self, *args: object) -> None:
        raise OSError("disk gone")


def test_a_failing_probe_removes_itself_and_keeps_the_reason() -> None:
    probe = CollectorProbe(Broken())  # type: ignore[arg-type]
    probe.install()
    gc.collect()
    assert probe._call not in gc.callbacks
    assert probe.failed == "OSError: disk gone"
    gc.collect()  # and the program goes on
