"""A recipe says for how many sessions of a load it holds; `recipe verify` replays them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvtune import __version__
from kvtune.answers.capacity.result import Capacity
from kvtune.answers.tune.recipes import verify as verifying
from kvtune.answers.tune.recipes.sessions import Saving, holding, refuse_other_settings
from kvtune.answers.tune.recipes.shelf import export
from kvtune.answers.tune.recipes.verify import refuse_foreign
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.data.recipe import About, Recipe, read_recipe, sessions_of, write_recipe
from kvtune.data.show.screen import document_lines
from kvtune.lab.device.cost import NOMINAL
from kvtune.lab.setup.setup import Setup, Simulated
from kvtune.reading.report.recipe import document
from tests.capacities import found as answered
from tests.recorded_sessions import asked, unpacked, written
from tests.simulator import run

SPEC = "hours=0.2,max_think=160"
FLAGS = ["--block-size", "32", "--num-gpu-blocks-override", "90", "--max-model-len", "1600"]
TUNED: dict[str, Any] = {
    "objective": "hit-rate",
    "workload": "rounds:prefixes=2",
    "seed": 0,
    "workload_hash": "h",
    "engine_args": ["--block-size", "32"],
}
SETUP = Setup(model="tiny-llama", engine_args=FLAGS, device=Simulated())


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Capacity:
    """An answer in which the hits stay with the estimate's lowest number; replays are estimates with figures."""
    spec = f"trace:path={unpacked(tmp_path_factory.mktemp('sessions'))},{SPEC}"
    return replace(answered(spec, holds=True, remedies=False, sessions=3), model="tiny-llama")


def test_what_was_found_is_filed_and_read_again(told: Capacity, tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    made = holding(None, SETUP, told)
    write_recipe(made, path)
    held = sessions_of(read_recipe(path))
    assert held is not None and made.recipe.status == "simulated" and made.recipe.core == "stock"
    assert made.engine == {"block_size": 32}, "sizes of one machine are evidence, and no settings"
    assert (held.up_to, held.keep, held.engine_args) == (told.held, 0.9, FLAGS)
    assert held.workload.endswith("longest=131072,hours=0.2") and held.measured_s == (240.0, 720.0)
    assert held.replays[str(told.held)].seeds == [0, 1, 2] and held.kvtune == __version__
    assert held.cost["prefill_token_us"] == NOMINAL.prefill_token_us and held.cost_source == "plausible"
    said = " ".join(document_lines(document(read_recipe(path), "r", "")))
    assert f"holds for up to {told.held} sessions of this load at once: hits stay above 90 %" in said
    assert "step times not known" in said and "No evidence" not in said


def test_no_number_that_a_seed_does_not_keep_is_filed(told: Capacity) -> None:
    """`held` is by replays of every seed, not by the estimate's range."""
    asked_for = next(one for one in told.answers if one.keep == 0.9).sessions
    assert 1 <= told.held <= asked_for.high
    at = next(point for point in told.curve if point.by == "replay" and point.sessions == told.held)
    assert min(seed.kept for seed in at.seeds) >= 0.9
    with pytest.raises(
        KvtuneError, match=r"no recipe was written: with \d+ sessions at once, not every seed"
    ):
        holding(None, SETUP, replace(told, held=0))


def test_a_recipe_keeps_its_settings_and_its_evidence(told: Capacity, tmp_path: Path) -> None:
    about = About(model="tiny-llama", device="cpu", vllm="0.32.0", kvtune="0.1.0", status="confirmed")
    base = Recipe(recipe=about, engine={"block_size": 32}, core={"slack": 64}, evidence=TUNED)
    made = holding(base, SETUP, told)
    assert replace(made, evidence=TUNED) == base
    assert made.evidence == {**TUNED, "sessions": made.evidence["sessions"]}
    refuse_other_settings(base, "r.toml", SETUP)
    for flags, says in (
        (["--block-size", "64"], "block_size is 64, and r.toml has 32"),
        (["--block-size", "32", "--max-num-seqs", "8"], "max_num_seqs is 8, and r.toml does not set it"),
    ):
        with pytest.raises(UsageError, match=says):
            refuse_other_settings(base, "r.toml", replace(SETUP, engine_args=flags))


def test_neither_vllm_nor_an_export_sees_the_sessions(told: Capacity, tmp_path: Path) -> None:
    about = About(model="tiny-llama", device="cpu", vllm="0.32.0", kvtune="0.1.0")
    base = Recipe(recipe=about, engine={"block_size": 32}, core={"slack": 64}, evidence=TUNED)
    for name, one in (("plain", base), ("held", holding(base, SETUP, told))):
        export(one, tmp_path / name)
    for name in ("config.yaml", "env.sh"):
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "held" / name).read_bytes()


def test_a_file_is_written_over_only_where_it_was_written_for_the_question(
    told: Capacity, tmp_path: Path
) -> None:
    path, mine = tmp_path / "r.toml", tmp_path / "mine.toml"
    Saving.begin(path, SETUP, "s", "").write(told)
    Saving.begin(path, SETUP, "s", "").write(told)
    with pytest.raises(UsageError, match="kvtune did not write it for this capacity"):
        Saving.begin(path, SETUP, "another load", "")
    Saving.begin(path, SETUP, "another load", "", force=True).write(told)
    about = About(model="tiny-llama", device="", vllm="", kvtune="")
    write_recipe(Recipe(recipe=about, engine={"block_size": 32}, core={}), mine)
    with pytest.raises(UsageError, match="kvtune did not write it for this capacity"):
        Saving.begin(mine, SETUP, "s", "")
    Saving.begin(mine, SETUP, "s", str(mine)).write(told)
    assert sessions_of(read_recipe(mine)) is not None, "the recipe's own file was named twice"


def test_a_shipped_recipe_is_not_written_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from kvtune.answers.tune.recipes import shelf

    about = About(model="tiny-llama", device="", vllm="", kvtune="")
    write_recipe(Recipe(recipe=about, engine={"block_size": 32}), path := tmp_path / "shipped.toml")
    monkeypatch.setattr(shelf, "SHIPPED", (tmp_path,))
    with pytest.raises(UsageError, match="came with kvtune"):
        Saving.begin(path, SETUP, "s", str(path))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"up_to": 7_777}, "has no replay of 7777 sessions"),
        ({"up_to": 0}, "Expected `int` >= 1"),
        ({"keep": 1.5}, "Expected `float` < 1"),
        ({"cost": {"step_us": float("nan")}}, "Expected `float` >= 0"),
        ({"replays": {"x": {"seeds": [0]}}}, "workload_hashes"),
        ({"slo": {"ttft": -1.0}}, "Expected `float` >= 0"),
    ],
)
def test_sessions_that_do_not_fit_together_are_refused(
    told: Capacity, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    made = holding(None, SETUP, told)
    write_recipe(
        replace(made, evidence={"sessions": {**made.evidence["sessions"], **change}}), tmp_path / "r"
    )
    with pytest.raises(UsageError, match=says):
        read_recipe(tmp_path / "r")


@pytest.mark.parametrize("field", ["seeds", "hit_tokens"])
def test_seeds_and_figures_are_as_many(told: Capacity, tmp_path: Path, field: str) -> None:
    made = holding(None, SETUP, told)
    replays = made.evidence["sessions"]["replays"]
    short = {**replays, str(told.held): {**replays[str(told.held)], field: [0]}}
    write_recipe(
        replace(made, evidence={"sessions": {**made.evidence["sessions"], "replays": short}}), tmp_path / "r"
    )
    with pytest.raises(UsageError, match="with other seeds than it has figures for"):
        read_recipe(tmp_path / "r")


def test_every_machine_may_replay_sessions_and_no_other_device_serves_them(
    told: Capacity, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = holding(None, SETUP, told)
    gpu = replace(made, recipe=replace(made.recipe, device="cuda", device_name="NVIDIA H200", vllm="0.32.0"))
    monkeypatch.setattr(verifying, "installed_device", lambda: "cpu")
    monkeypatch.setattr(verifying, "check_engine", lambda: "0.32.0")
    refuse_foreign(gpu, "r.toml", anyway=False, versions=False)
    with pytest.raises(UsageError, match="is for the device cuda"):
        refuse_foreign(gpu, "r.toml", anyway=False)
    tuned = replace(gpu, evidence={**TUNED, **gpu.evidence})
    with pytest.raises(UsageError, match="is for the device cuda"):
        refuse_foreign(tuned, "r.toml", anyway=False, versions=False)


def sessions(folder: Path, turns: int = 8) -> Path:
    """Write four sessions whose prompts grow by 128 tokens a turn, with pauses of 9 s."""
    for number in range(4):
        requests = [
            asked(9.0 * turn, 256 + 128 * turn, range(1000 * number, 1000 * number + 4 + 2 * turn))
            for turn in range(turns)
        ]
        written(folder, requests, name=f"trace_{number}")
    return folder


@pytest.mark.vllm
def test_from_the_command_line_to_a_verified_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written, replayed to the same tokens; a smaller pool, another log and none at all are told apart."""
    monkeypatch.chdir(tmp_path)
    log = sessions(tmp_path / "log")
    load = ["-w", f"trace:format=weka,path={log},hours=0.05,max_think=20"]
    words = ["capacity", "tiny-llama", *load, "--sessions", "2", "--seeds", "2", "--no-remedies"]
    assert run([*words, "--keep", "95%", "--save", "r.toml", "--", *FLAGS]) == 0
    assert "recipe  r.toml, holds for up to 2 sessions at once" in capsys.readouterr().out
    assert run(["recipe", "verify", "r.toml"]) == 2, "no path that a file names is opened"
    assert "name it with --trace FILE" in capsys.readouterr().err
    verify = ["recipe", "verify", "r.toml", "--trace", str(log), "--json"]
    assert run(verify) == 0
    verified = json.loads(capsys.readouterr().out)
    filed = sessions_of(read_recipe(Path("r.toml")))
    assert (
        filed is not None and verified["holds"] and "the same tokens as when it was made" in verified["text"]
    )
    again = verified["sessions"]["replays"]["2"]
    assert again["hit_tokens"] == filed.replays["2"].hit_tokens and again["kept"] == filed.replays["2"].kept

    text = Path("r.toml").read_text()
    smaller = text.replace('"90"', '"55"').replace('"simulated"', '"hand-written"')
    lines = [line for line in smaller.splitlines() if not line.startswith("checksum")]
    Path("small.toml").write_text("\n".join(lines))
    assert run(["recipe", "verify", "small.toml", "--trace", str(log), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["holds"] and "does not hold for up to 2 sessions" in told["text"]
    assert "; when it was made " in told["text"] and "the pool has 1,760 tokens, 2,880" in told["text"]

    sessions(log, turns=7)
    assert run(verify) == 2
    assert f"path={log}" in (said := capsys.readouterr().err) and "its requests are others" in said
    shutil.rmtree(log)
    assert run(verify) == 2
    assert str(log) in capsys.readouterr().err
