"""Extras of a run: optional results come back as their types; a damaged one reads as never recorded."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import msgspec
import pytest

from kvtune.data.run.extras import (
    CollectorCounts,
    Extras,
    FleetInfo,
    GpuFacts,
    HeapSize,
    ObjectCounts,
    ObjectRow,
    ObjectSamples,
    OtherRouting,
    Remedy,
    Replay,
    Replayed,
    ServerAccount,
    ServerPrefix,
    StackFunction,
    StackSamples,
    TextAccount,
    TextGroup,
    Trigger,
    read_extras,
)
from kvtune.data.run.file import read_run, write_run
from kvtune.data.run.types import Run
from tests.reading.analysis.made import header_of

ROWS = [ObjectRow(type="list", file="a.py", line=3, count=9, bytes=504)]
EVERYTHING = Extras(
    ledger={
        "1": CollectorCounts(
            collections=4,
            young=90,
            survivors=7,
            heap=HeapSize(start=10, last=12),
            triggers=[Trigger(file="a.py", line=3, collections=4)],
        )
    },
    types=ObjectSamples(steps=5, processes={"0": ObjectCounts(samples=1, collections=4, rows=ROWS)}),
    sites=ObjectSamples(
        steps=5,
        processes={"1": ObjectCounts(sampled="steps", rows=ROWS, at_collections=ObjectCounts(rows=ROWS))},
    ),
    stacks={
        "engine_core": StackSamples(
            file="a.json",
            rate_hz=100,
            threads="loop",
            top=[StackFunction(function="step", file="a.py", line=1, share=0.4)],
            flame=[(0, 0.0, 1.0, "step", "a.py", 1)],
        ),
        "worker": StackSamples(failed="py-spy left no recording"),
    },
    devices=["NVIDIA H100"],
    gpus=[GpuFacts(memory_bytes=80 << 30, driver="580.65.06", power_limit_w=700.0)],
    digests=[1, 2**32 - 1],
    misses={"cold": 5},
    replayed=Replayed(
        query_tokens=100,
        hit_tokens=30,
        other=Remedy(change="--core stock", core="stock", error="no vLLM"),
        remedies=[
            Remedy(change="slack", core="kvtune", core_settings={"slack": 64, "packed": True}, gain_tokens=5),
            Remedy(change="blocks", flags={"block-size": "16", "num-gpu-blocks-override": None}),
        ],
    ),
    slo={"ttft": 500.0},
    computed_twice={"3": {"evicted": 64, "partial_block": 5}},
    fleet=FleetInfo(replicas=2, router="session", others=[OtherRouting(router="prefix", hit_tokens=3)]),
    sim=Replay(steps=3),
    server=ServerAccount(
        query_tokens=100, hit_tokens=95, misses={"cold": 5}, prefixes=[ServerPrefix(visits=2)]
    ),
    texts=TextAccount(query_tokens=100, groups=[TextGroup(kind="time", at=40, tokens_after=50)]),
    idle={"prompt_tokens": 100, "hit_tokens": 64},
    step_cost={"step_us": 7.0, "fitted": True, "steps": 3, "machine": "here"},
    verdicts=[None, {"request_id": "1"}],
)


def test_every_part_comes_back_as_it_was_written(tmp_path: Path) -> None:
    assert all(getattr(EVERYTHING, name) != getattr(Extras(), name) for name in Extras.__struct_fields__)
    write_run(Run(header_of(extra=EVERYTHING)), tmp_path / "a.kvrun")
    assert read_run(tmp_path / "a.kvrun").header.extra == EVERYTHING


def test_what_was_not_recorded_is_not_in_the_file(tmp_path: Path) -> None:
    write_run(Run(header_of(extra=Extras(slo={"ttft": 5.0}))), tmp_path / "a.kvrun")
    with zipfile.ZipFile(tmp_path / "a.kvrun") as archive:
        assert json.loads(archive.read("header.json"))["extra"] == {"slo": {"ttft": 5.0}}


@pytest.mark.parametrize("name", Extras.__struct_fields__)
def test_a_damaged_part_reads_as_never_recorded_and_the_others_stand(name: str) -> None:
    stored = msgspec.to_builtins(EVERYTHING)
    extras = read_extras({**stored, name: "damaged", "a_part_of_a_later_version": 3})
    assert extras == msgspec.structs.replace(EVERYTHING, **{name: getattr(Extras(), name)})


@pytest.mark.parametrize("stored", [None, [], 7, "extra"])
def test_extras_that_are_no_object_are_empty(stored: object) -> None:
    assert read_extras(stored) == Extras()


def test_a_part_can_be_replaced_alone() -> None:
    run = Run(header_of(extra=EVERYTHING)).with_extra(misses={"cold": 6})
    assert run.header.extra == msgspec.structs.replace(EVERYTHING, misses={"cold": 6})
