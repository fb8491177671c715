"""The command that repeats a run is the run's own, with the settings that are named instead."""

from __future__ import annotations

import shlex

import msgspec
import pytest

from kvtune.analysis.again import profile_line, with_remedy
from kvtune.run.extras import Remedy
from kvtune.run.types import CoreInfo, Run
from tests.golden.synthetic import replace_header, rounds_run


def run_of(*command: str, **header: object) -> Run:
    run = replace_header(rounds_run(), command=["kvtune", "profile", "m", *command], **header)
    workload = msgspec.structs.replace(run.header.workload, spec="rounds", seed=7)
    engine = msgspec.structs.replace(run.header.engine, args=["--block-size", "32"])
    return replace_header(run, workload=workload, engine=engine)


@pytest.mark.parametrize(
    ("source", "options", "place", "then"),
    [
        ("engine", [], [], []),
        ("engine", ["--dummy", "-o", "x", "--mode", "exact"], [], ["--dummy"]),
        ("sim", ["--on", "sim", "--like-device=h100"], ["--on", "sim", "--like-device=h100"], []),
        ("host", ["--step-us", "10", "--", "--like", "x"], ["--on", "host", "--step-us", "10"], []),
    ],
)
def test_it_runs_where_the_run_ran(
    source: str, options: list[str], place: list[str], then: list[str]
) -> None:
    words = shlex.split(profile_line(run_of(*options, source=source)))
    assert words == [
        *("kvtune", "profile", "tiny-gemma3", *place, "--seed", "7", "--core", "stock", *then),
        *("--", "--block-size", "32"),
    ]


def test_a_remedy_changes_what_it_names_and_keeps_the_rest() -> None:
    core = CoreInfo(name="kvtune", active=True, settings={"slack": 64})
    remedy = Remedy(
        change="",
        core="kvtune",
        core_settings={"slack": 128, "packed": True},
        flags={"block-size": None, "max-num-seqs": "8"},
    )
    assert shlex.split(with_remedy(run_of(core=core), remedy))[-7:] == [
        *("--set", "core.slack=128", "--set", "core.packed=true", "--", "--max-num-seqs", "8")
    ]
    assert "--core" not in with_remedy(run_of(core=core), remedy), "it is the default"
    assert "core.slack=64" in profile_line(run_of(core=core))
