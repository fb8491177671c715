"""One value says what runs: what is made of it, what is refused, and that nothing else declares it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kvtune
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.platforms import DEVICES
from kvtune.data.run.file import read_run
from kvtune.lab.device.settings import constant, nominal
from kvtune.lab.setup.setup import Load, Pool, Setup, Simulated
from kvtune.requests.loads.spec import build

GALLERY = Path(__file__).parents[3] / "reports" / "gallery"
SOURCES = sorted(Path(kvtune.__file__).parent.rglob("*.py"))
POOL = ["--num-gpu-blocks-override", "100"]


def classes() -> dict[str, set[str]]:
    """The fields of each class of kvtune."""
    nodes = [node for file in SOURCES for node in ast.walk(ast.parse(file.read_text()))]
    return {
        node.name: {
            line.target.id
            for line in node.body
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }


@pytest.mark.lint
def test_one_class_declares_an_engines_set_up() -> None:
    assert [name for name, fields in classes().items() if {"model", "engine_args"} <= fields] == ["Setup"]


@pytest.mark.lint
def test_only_the_lab_makes_what_runs_set_ups() -> None:
    made = {
        str(file.relative_to(Path(kvtune.__file__).parent))
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in ("Simulators", "EngineBench")
    }
    assert made == {"lab/lab.py"}


def test_commands_are_handed_the_lab_and_look_for_none() -> None:
    cli = Path(kvtune.__file__).parent / "cli"
    own = {file.name for file in cli.rglob("*.py") if "kvtune.lab.lab import LAB" in file.read_text()}
    assert own == {"query.py"}


def test_it_travels_as_json() -> None:
    setup = Setup(
        model="m",
        load=Load(spec="rounds", seed=3, hash="h", slo={"ttft": 9.0}),
        engine_args=POOL,
        core="kvtune",
        core_settings={"slack": 64},
        device=nominal(),
        platform=DEVICES["h100"],
    )
    for device in (setup.device, constant(8.0), Simulated(specs={"version": 1}, requests=[2])):
        one = msgspec.structs.replace(setup, device=device)
        assert msgspec.json.decode(msgspec.json.encode(one), type=Setup) == one


def test_a_runs_set_up_is_its_engine_with_the_requests_it_sent() -> None:
    run = read_run(GALLERY / "rounds-stock.kvrun")
    setup = Setup.of_run(run)
    assert (setup.model, setup.engine_args) == (run.header.model, run.header.engine.args)
    assert setup.core == "stock" and setup.simulated.specs == run.header.engine.kv_specs
    assert setup.simulated.cost.fitted and setup.simulated.requests == []


def test_knobs_go_where_they_act() -> None:
    setup = Setup(model="m", engine_args=POOL, core="kvtune", pool=Pool(block_tokens=32))
    changed = setup.with_knobs({"slack": 64, "max_num_seqs": 8})
    assert changed.core_settings == {"slack": 64}
    assert changed.engine_args == [*POOL, "--max-num-seqs", "8"]
    smaller = setup.with_knobs({"block_size": 16})
    assert smaller.engine_args[-4:] == ["--block-size", "16", "--num-gpu-blocks-override", "200"]
    assert setup.stock().with_knobs({"slack": 64}).core_settings == {}
    assert setup.with_knobs({}) == setup


def test_a_size_of_the_pool_that_flags_give_stays() -> None:
    assert Setup(model="m", engine_args=POOL).with_pool(900, 32).engine_args == POOL
    given = Setup(model="m").with_pool(900, 32)
    assert (given.engine_args, given.pool.block_tokens) == (["--num-gpu-blocks-override", "900"], 32)
    assert Setup(model="m").with_pool(0, 32) == Setup(model="m")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"platform": DEVICES["h100"]}, "--like-device h100 is for simulations"),
        ({"platform": DEVICES["h100"], "device": nominal()}, "--like-device h100 is for simulations"),
        ({"core_settings": {"slack": 64}}, "core.slack is a setting of kvtune's core"),
        ({"device": Simulated(), "engine_args": ["-dp", "2"]}, "--data-parallel-size 2: a replay has one"),
    ],
)
def test_a_combination_that_cannot_work_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as refused:
        Setup(model="tiny-opt", **changes).refuse()
    assert refused.value.message.startswith(says) and refused.value.hint


def test_what_can_work_is_not_refused() -> None:
    for device in (nominal(), Simulated()):
        Setup(model="tiny-opt", core="kvtune", core_settings={"slack": 64}, device=device).refuse()
    Setup(model="tiny-opt", engine_args=["-dp", "2"]).refuse()
    Setup(model="tiny-opt", device=Simulated(), platform=DEVICES["h100"]).refuse()


def test_a_load_whose_file_has_changed_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": [1, 2, 3], "max_tokens": 2}\n')
    workload = build(f"requests:path={path}")
    load = Load.of(workload)
    assert load.built() is workload, "built once"
    path.write_text('{"prompt": [1, 2, 3, 4], "max_tokens": 2}\n')
    again = Load(spec=load.spec, seed=1, hash=load.hash)
    with pytest.raises(KvtuneError, match="has changed since the command started"):
        again.built()
    first = Load(spec=load.spec).built()
    path.write_text('{"prompt": [1, 2], "max_tokens": 2}\n')
    assert Load(spec=load.spec).built().hash != first.hash, "nobody keeps it for another load"
