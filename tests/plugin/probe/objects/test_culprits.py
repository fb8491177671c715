"""Census, sites: a planted culprit ranks first, only its phase is counted, failures stay inside."""

from __future__ import annotations

import gc
import json
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtune.plugin.probe import gc as gc_module
from kvtune.plugin.probe.gc import CollectorProbe, Heap, collector_kind
from kvtune.plugin.probe.objects import sites as sites_module
from kvtune.plugin.probe.objects.census import Census
from kvtune.plugin.probe.objects.sites import Sites, site_reader
from kvtune.plugin.probe.objects.step_sites import StepSites
from kvtune.plugin.probe.objects.tally import OTHER, Tally, load, save
from kvtune.plugin.probe.phase import CULPRITS, MEASURING, OVER, Phase
from kvtune.plugin.probe.records import Collection
from kvtune.plugin.probe.ring import Ring, read_ring


@dataclass
class Request:
    tokens: list[list[int]]


def engine_steps(requests: list[Request], steps: int) -> None:
    """A step makes a list for each request and keeps it: the culprit; and a few dicts that it drops."""
    for step in range(steps):
        for request in requests:
            request.tokens.append([step])  # the planted culprit
        for _ in range(20):
            {"dropped": step}  # noqa: B018


CULPRIT_LINE = engine_steps.__code__.co_firstlineno + 4


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[CollectorProbe]:
    probe = CollectorProbe(Ring(tmp_path / "ring", 1 << 22))
    probe.install()
    yield probe
    probe.remove()
    if tracemalloc.is_tracing():
        tracemalloc.stop()


def test_sites_name_the_planted_culprit_first_with_its_count_per_step(
    probe: CollectorProbe, tmp_path: Path
) -> None:
    phase = Phase(tmp_path)
    sites = Sites(tmp_path, phase, budget=1.0)
    probe.listeners.append(sites)
    requests = [Request([]) for _ in range(64)]
    engine_steps(requests, 100)
    assert sites.facts()["collections"] == 0  # not its phase
    phase.enter(CULPRITS)
    engine_steps(requests, 3000)
    facts = sites.facts()
    phase.enter(OVER)
    assert probe.failed_listeners == {}
    assert facts["samples"] >= 10
    first = facts["rows"][0]
    assert (first["type"], first["file"], first["line"]) == ("list", __file__, CULPRIT_LINE)
    per_step = first["count"] / facts["samples"] * facts["collections"] / 3000
    assert per_step == pytest.approx(64, rel=0.1)
    assert first["bytes"] / first["count"] == pytest.approx(64, abs=40)


def test_tracing_ends_with_the_pass(probe: CollectorProbe, tmp_path: Path) -> None:
    phase = Phase(tmp_path)
    probe.listeners.append(Sites(tmp_path, phase, budget=1.0))
    phase.enter(CULPRITS)
    gc.collect(0)
    assert tracemalloc.is_tracing()
    phase.enter(OVER)
    gc.collect(0)
    assert not tracemalloc.is_tracing()


def test_a_sample_whose_second_collection_does_not_come_is_given_up(
    probe: CollectorProbe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding in small batches makes as many objects as it drops: tracing would go on for minutes."""
    now = [0]
    monkeypatch.setattr(sites_module, "process_time_ns", lambda: now[0])
    phase = Phase(tmp_path)
    sites = Sites(tmp_path, phase, budget=0.1)
    probe.listeners.append(sites)
    phase.enter(CULPRITS)
    now[0] = 1
    gc.collect(0)
    assert tracemalloc.is_tracing()
    now[0] += sites_module.LONGEST_NS
    sites.expire()
    assert tracemalloc.is_tracing()
    now[0] += 1
    sites.expire()
    assert not tracemalloc.is_tracing()
    assert sites.facts()["traced_share"] == pytest.approx(1.0)  # it counts against the budget
    assert sites.facts()["samples"] == 0


def test_tracing_that_others_started_is_left_alone(probe: CollectorProbe, tmp_path: Path) -> None:
    phase = Phase(tmp_path)
    probe.listeners.append(Sites(tmp_path, phase, budget=1.0))
    tracemalloc.start(3)
    phase.enter(CULPRITS)
    for _ in range(5):
        gc.collect(0)
    phase.enter(OVER)
    gc.collect(0)
    assert tracemalloc.is_tracing() and tracemalloc.get_traceback_limit() == 3


def test_budget_bounds_the_traced_share(
    probe: CollectorProbe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0]
    monkeypatch.setattr(sites_module, "process_time_ns", lambda: now[0])
    phase = Phase(tmp_path)
    sites = Sites(tmp_path, phase, budget=0.1)
    probe.listeners += [Works(now, 500_000), sites]  # a millisecond from collection to collection
    phase.enter(CULPRITS)
    requests = [Request([]) for _ in range(64)]
    engine_steps(requests, 4_000)
    facts = sites.facts()
    assert facts["samples"] >= 4
    assert facts["samples"] < facts["collections"] / 2
    assert 0 < facts["traced_share"] < 0.15


class Plain:
    def __init__(self) -> None:
        self.field = 1


def test_instances_with_a_dict_have_a_site() -> None:
    tracemalloc.start(1)
    try:
        plain = Plain()
        assert site_reader()(plain)[0] == __file__
    finally:
        tracemalloc.stop()


def test_census_counts_the_young_by_type(probe: CollectorProbe, tmp_path: Path) -> None:
    phase = Phase(tmp_path)
    census = Census(tmp_path, phase, every=1)
    probe.listeners.append(census)
    phase.enter(MEASURING)
    gc.disable()
    try:
        gc.collect(0)
        kept = [[i] for i in range(50_000)]
        gc.collect(0)
    finally:
        gc.enable()
    facts = census.facts()
    assert facts["rows"][0]["type"] == "list"
    assert facts["rows"][0]["count"] >= len(kept)
    assert facts["cost_us"] > 0
    census.save()
    assert next(iter(load(tmp_path, "types").values()))["samples"] == facts["samples"]


class Works:
    """An instrument that takes its time at each collection, by a clock that only this test moves."""

    name = "works"

    def __init__(self, now: list[int], takes_ns: int) -> None:
        self.now, self.takes_ns = now, takes_ns

    def before(self, generation: int) -> None:
        self.now[0] += self.takes_ns

    after = before


def test_a_pause_is_the_collection_alone_to_the_nanosecond(
    probe: CollectorProbe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what an instrument does before and after it. (What is left of real time: reports/tables/overhead.md.)"""

    class Garbage:
        def __del__(self) -> None:
            now[0] += 7_000

    now = [1_000_000]
    monkeypatch.setattr(gc_module, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(gc_module, "thread_time_ns", lambda: now[0] // 2)
    gc.collect()
    probe.listeners.append(Works(now, 50_000_000))
    gc.disable()
    try:
        garbage = Garbage()
        garbage.itself = garbage  # type: ignore[attr-defined]
        del garbage
        now[0] = 2_000_000
        gc.collect(0)
    finally:
        gc.enable()
    row = next(r for r in reversed(read_ring(tmp_path / "ring").of(Collection)) if r.generation == 0)
    assert (row.start_ns, row.pause_ns, row.cpu_ns) == (52_000_000, 7_000, 3_500)
    assert now[0] == 102_007_000  # both ends of the instrument were there


class Breaks:
    name = "breaks"

    def before(self, generation: int) -> None:
        raise RuntimeError("planted")

    def after(self, generation: int) -> None: ...


def test_an_instrument_that_raises_is_dropped_and_recorded_and_pauses_go_on(
    probe: CollectorProbe, tmp_path: Path
) -> None:
    probe.listeners.append(Breaks())
    before = len(read_ring(tmp_path / "ring").rows)
    gc.collect()
    gc.collect()
    assert probe.failed_listeners == {"breaks": "RuntimeError: planted"}
    assert probe.failed == "" and probe.listeners == []
    assert len(read_ring(tmp_path / "ring").rows) >= before + 2


def test_this_collector_is_generational() -> None:
    assert collector_kind() == "generational"


def test_an_incremental_collector_is_detected_by_its_behaviour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_objects", lambda generation=None: [])  # 3.14: there is no middle generation
    assert collector_kind() == "incremental"


def test_heap_is_counted_when_measuring_begins(probe: CollectorProbe, tmp_path: Path) -> None:
    phase = Phase(tmp_path)
    heap = Heap(phase)
    probe.listeners.append(heap)
    gc.collect()
    assert heap.objects == {}
    kept: list[list[int]] = [[] for _ in range(1500)]  # what was there before is frozen, in some orders all
    phase.enter(MEASURING)
    gc.collect()
    assert len(kept) == 1500
    assert heap.objects["start"] > 1000 and heap.objects["last"] > 1000


def test_triggers_name_the_line(probe: CollectorProbe, tmp_path: Path) -> None:
    gc.collect()
    row = read_ring(tmp_path / "ring").of(Collection)[-1]
    file, line = probe.triggers()[row.line]
    assert file == __file__ and "gc.collect()" in Path(file).read_text().splitlines()[line - 1]


def test_tally_is_bounded_and_keeps_its_sum(tmp_path: Path) -> None:
    tally = Tally(limit=10)
    for n in range(100):
        tally.add((f"type{n}", "", 0), 2, 8)
    top = tally.top(5)
    assert len(tally.rows) == 11 and tally.rows[OTHER][0] == 180
    assert len(top) == 6 and sum(row["count"] for row in top) == 200 and top[-1]["type"] == "other"


def test_files_that_cannot_be_saved_or_read_are_skipped(tmp_path: Path) -> None:
    save(tmp_path / "missing", "types", {})
    (tmp_path / "types-1.json").write_text('{"pid": 1, "rows": [')
    (tmp_path / "types-2.json").write_text(json.dumps({"pid": 2}))
    assert load(tmp_path, "types") == {2: {"pid": 2}}


def test_all_that_map_the_phase_see_the_same(tmp_path: Path) -> None:
    one, two = Phase(tmp_path), Phase(tmp_path)
    one.enter(CULPRITS)
    assert two.now == CULPRITS and Phase(tmp_path).now == CULPRITS


def test_a_sampled_step_counts_objects_that_die_before_any_collection(tmp_path: Path) -> None:
    """Lists that the update drops never make a collection due; a sampled step still counts them."""
    phase = Phase(tmp_path)
    sampler = StepSites(phase, budget=1.0)

    def step() -> None:
        sampler.begin()
        rows = [[n] for n in range(32)]
        sampler.output_is_in()
        rows.clear()
        sampler.end()

    step()
    assert sampler.facts()["samples"] == 0
    phase.enter(CULPRITS)
    for _ in range(200):
        step()
    facts = sampler.facts()
    first = facts["rows"][0]
    assert not tracemalloc.is_tracing() and facts["samples"] > 20
    assert (first["type"], first["file"]) == ("list", __file__)
    assert first["count"] / facts["samples"] in (
        32,
        33,
    )  # the rows, and on some Pythons the list that holds them
