"""The command that repeats a run is the run's own, with the settings that are named instead."""

from __future__ import annotations

import shlex

import msgspec
import pytest

from kvtune.data.run.extras import FleetInfo, Remedy
from kvtune.data.run.types import CoreInfo, Run
from kvtune.reading.analysis.again import profile_again, profile_line, with_remedy
from tests.documents import complaint
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
        ("sim", ["--on", "sim", "--replicas", "1"], ["--on", "sim", "--replicas", "1"], []),
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


@pytest.mark.parametrize(
    ("source", "fleet", "words"),
    [
        ("sim", FleetInfo(replicas=4, router="session"), ["--replicas", "4", "--router", "session"]),
        ("sim", FleetInfo(replicas=2, router="given"), []),
        ("sim", FleetInfo(replicas=2, router="a; rm"), []),
        ("sim", FleetInfo(replicas=65, router="prefix"), []),
        ("engine", FleetInfo(replicas=2, router="prefix"), []),
    ],
)
def test_a_fleet_has_its_replicas_and_router(source: str, fleet: FleetInfo, words: list[str]) -> None:
    """Whoever made the run: its header has them. A log that names replicas says itself where requests go."""
    run = run_of("--on", "sim", "--replicas", "3", source=source).with_extra(fleet=fleet)
    place = ["--on", "sim"] if source == "sim" else []
    for line in (profile_line(run), profile_again(run, "x"), with_remedy(run, Remedy(change=""))):
        assert complaint(line) == "" and shlex.split(line)[3:][: len(place) + len(words) + 1] == [
            *place,
            *words,
            "--seed",
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
