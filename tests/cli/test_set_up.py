"""A printed command says what differs from the defaults, and parsing it gives the set-up that it was written for."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import typer

from kvtune.answers.invocation import of_setup
from kvtune.base.errors import UsageError
from kvtune.cli.app import build_app
from kvtune.cli.settings import core_settings
from kvtune.data.knobs import CoreSettings
from kvtune.data.platforms import device
from kvtune.data.run.slo import read_slo
from kvtune.data.run.types import CoreInfo
from kvtune.lab.setup.setup import Load, Setup
from kvtune.reading.analysis.again import ON, Invocation, load_words, of_run, profile_line, tune_line
from kvtune.requests.loads.registry import WORKLOADS
from kvtune.requests.loads.spec import DEFAULT_SPEC, parsed, shortest
from tests.documents import complaint
from tests.golden.synthetic import replace_header, rounds_run

IN_FULL = "rounds:prefixes=12,prefix=1500,suffix=64,output=16,rounds=3"
SET_UPS = {
    "defaults": Invocation(model="tiny-gemma3"),
    "the default load in full": Invocation(model="m", spec=IN_FULL),
    "another load": Invocation(model="m", spec="zipf:requests=77", seed=3),
    "all of the core": Invocation(model="m", core_settings=CoreSettings().to_dict()),
    "two of the core": Invocation(model="m", core_settings={**CoreSettings(slack=64, packed=True).to_dict()}),
    "every digit": Invocation(model="m", core_settings={"reuse_bonus_s": 0.123456789}),
    "stock": Invocation(model="org/m", core="stock", flags=["--block-size", "32", "--max-num-seqs", "8"]),
    "limits": Invocation(model="m", slo={"ttft": 500.0, "tpot": 12.5}, dummy=True),
}


def parse(line: str) -> tuple[str, Invocation]:
    """Parse a printed command with the command line's own parser."""
    words = shlex.split(line)
    assert words.pop(0) == "kvtune"
    flags = words[words.index("--") + 1 :] if "--" in words else []
    verb, *rest = words[: words.index("--")] if "--" in words else words
    command: Any = typer.main.get_command(build_app())
    with command.commands[verb].make_context(verb, rest) as context:
        got = context.params
    where = ["--on", got["on"]] if got["on"] != ON[verb] or got["platform"] else []
    return verb, Invocation(
        model=got["model"],
        spec=got["workload"] or DEFAULT_SPEC,
        seed=got["seed"],
        core=got["core"] or "kvtune",
        core_settings=core_settings(got.get("set_") or []),
        flags=flags,
        where=where + (["--like-device", got["platform"].key] if got["platform"] else []),
        dummy=got["dummy"],
        slo=read_slo(got["slo"]),
        objective=got.get("objective", "hit-rate"),
    )


def meaning(of: Invocation) -> dict[str, Any]:
    """What runs: values, not their spelling."""
    kind, values = parsed(of.spec, of.seed)
    core = CoreSettings(**{**CoreSettings().to_dict(), **of.core_settings}) if of.core == "kvtune" else None
    plain = {name: getattr(of, name) for name in ("model", "seed", "core", "dummy", "objective")}
    lists = {name: list(getattr(of, name)) for name in ("flags", "where")}
    return {**plain, **lists, "load": (kind.name, values), "settings": core, "slo": dict(of.slo)}


@pytest.mark.parametrize("verb", ["profile", "sweep", "tune"])
@pytest.mark.parametrize("name", SET_UPS)
def test_a_printed_command_gives_its_set_up(name: str, verb: str) -> None:
    at = SET_UPS[name]
    if verb != "profile":  # `sweep` and `tune` choose the core's settings
        at = replace(at, core_settings={})
    assert complaint(at.line(verb)) == ""
    got, parsed_back = parse(at.line(verb))
    assert (got, meaning(parsed_back)) == (verb, meaning(at))


@pytest.mark.parametrize(
    "where", [("--on", "sim", "--like-device", "h100"), ("--on", "host", "--step-us", "5")]
)
def test_a_simulated_run_of_random_weights_is_repeated_without_them(where: tuple[str, ...]) -> None:
    """A simulation has no weights: an older kvtune took --dummy there, and today's refuses it."""
    line = Invocation(model="m", dummy=True, where=where).line("profile")
    assert complaint(line) == "" and "--dummy" not in line
    assert complaint(f"{line} --dummy").startswith("--dummy is read only with --on engine")


def test_nothing_that_is_a_default_is_printed() -> None:
    assert SET_UPS["defaults"].line("profile") == "kvtune profile tiny-gemma3"
    assert SET_UPS["the default load in full"].line("tune") == "kvtune tune m"
    assert SET_UPS["all of the core"].line("profile") == "kvtune profile m"
    assert shlex.split(SET_UPS["two of the core"].line("profile"))[3:] == [
        *("--set", "core.slack=64", "--set", "core.packed=true")
    ]


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_load_is_written_without_its_defaults(name: str) -> None:
    kind = WORKLOADS[name]
    needed = ["path=a,b.jsonl"] if any(key.name == "path" for key in kind.keys) else []
    named = f"{name}:{','.join(needed)}" if needed else name
    full = [f"{key.name}={key.default}" for key in kind.keys if key.default != "" and key.name != "seed"]
    assert shortest(f"{name}:{','.join((*needed, *full))}") in (named, f"{named},rate=0.0", f"{named},rate=0")
    for key in kind.keys:
        if isinstance(key.default, int) and key.name not in ("seed", "concurrency"):
            other = f"{named}{',' if needed else ':'}{key.name}={int(key.default) + 1}"
            with suppress(UsageError):  # a value out of range
                assert parsed(shortest(other), 0) == parsed(other, 0)


def test_a_seed_is_named_once() -> None:
    assert load_words("zipf:seed=5,requests=9", 5) == ["-w", "zipf:requests=9", "--seed", "5"]
    assert load_words("rounds", 0) == [] and load_words("rounds", 0, needed=True) == ["-w", "rounds"]
    assert load_words("a spec of another version", 0) == ["-w", "a spec of another version"]


def test_a_first_runs_command_is_short() -> None:
    run = rounds_run()
    workload = msgspec.structs.replace(run.header.workload, spec=DEFAULT_SPEC, seed=0)
    core = CoreInfo(name="kvtune", active=True, settings=CoreSettings().to_dict())
    engine = msgspec.structs.replace(run.header.engine, args=[])
    run = replace_header(run, workload=workload, core=core, engine=engine, command=["kvtune", "profile", "m"])
    assert profile_line(run) == "kvtune profile tiny-gemma3"
    assert tune_line(run) == "kvtune tune tiny-gemma3"
    assert meaning(of_run(run)) == meaning(parse(profile_line(run))[1])


def test_a_study_names_its_seed_limits_device_and_core() -> None:
    bench = Setup(
        model="m",
        load=Load(spec="rounds", seed=4, hash="", slo={"ttft": 9.0}),
        core="stock",
        dummy=True,
        platform=device("h100"),
    )
    at = of_setup(bench, ("goodput", "ttft"))
    assert meaning(parse(at.line("sweep"))[1]) == meaning(at)
