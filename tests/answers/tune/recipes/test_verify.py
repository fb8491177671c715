"""Verifying a recipe of other versions: simulated first, and the answer says in which of the two its gain survives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtune import __version__
from kvtune.answers.tune.confirm import Bout
from kvtune.answers.tune.objective import objective
from kvtune.answers.tune.recipes import verify as verifying
from kvtune.answers.tune.recipes.verify import Verified, other_pool, refuse_foreign, usable, verify
from kvtune.answers.tune.result import Place
from kvtune.base.errors import KvtuneError, UsageError
from kvtune.base.scratch import MARK
from kvtune.data.flags import flag_value
from kvtune.data.platforms import DEVICES
from kvtune.data.recipe import About, Recipe
from kvtune.data.run.folder import run_files
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.spec import build

SPEC = "rounds:prefixes=2"
EVIDENCE = {
    "objective": "hit-rate",
    "workload": SPEC,
    "seed": 0,
    "workload_hash": build(SPEC, seed=0).hash,
    "engine_args": ["--block-size", "32"],
}


def recipe(status: str = "confirmed") -> Recipe:
    about = About(model="tiny-opt", device="cpu", vllm="0.32.0", kvtune=__version__, status=status)
    return Recipe(recipe=about, engine={}, core={"slack": 128}, evidence=EVIDENCE)


def answer(on: Place, holds: bool) -> Verified:
    return Verified(holds=holds, on=on, text=f"{'holds' if holds else 'does not hold'}: on {on}")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the recipe was tried, in order; vLLM is 0.33.0 here. The simulator says no, the engine yes."""
    order: list[str] = []

    def simulated(*_: Any) -> Verified:
        order.append("sim")
        return answer("sim", holds=False)

    def measured(*_: Any) -> Verified:
        order.append("engine")
        return answer("engine", holds=True)

    monkeypatch.setattr(verifying, "check_engine", lambda: "0.33.0")
    monkeypatch.setattr(verifying, "installed_device", lambda: "cpu")
    monkeypatch.setattr(verifying, "_in_simulation", simulated)
    monkeypatch.setattr(verifying, "on_engine", measured)
    return order


def verified(tmp_path: Path, one: Recipe) -> Verified:
    return verify(one, "r.toml", rounds=2, output=tmp_path, say=lambda trial: None)


def test_a_recipe_of_another_vllm_is_simulated_first(asked: list[str], tmp_path: Path) -> None:
    found = verified(tmp_path, recipe())
    assert asked == ["sim", "engine"] and found.holds
    assert found.text == (
        "made with vLLM 0.32.0 (here: 0.33.0); simulated first, it does not hold: on sim; engine: holds: on engine"
    )
    assert found.differences == ["vLLM 0.32.0 (here: 0.33.0)"]


def test_a_vllm_that_the_simulator_does_not_know_is_measured_all_the_same(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> dict[str, Any]:
        raise KvtuneError("the simulator does not know vLLM 0.33.0: a.B is gone", "")

    monkeypatch.setattr(verifying, "_in_simulation", refused)
    found = verified(tmp_path, recipe())
    assert asked == ["engine"] and found.holds
    assert "could not be (the simulator does not know vLLM 0.33.0: a.B is gone)" in found.text


def test_a_recipe_of_this_version_is_not_simulated_first(
    asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "check_engine", lambda: "0.32.0")
    found = verified(tmp_path, recipe())
    assert asked == ["engine"] and found.text == "holds: on engine" and found.differences == []


def test_a_simulated_recipe_of_another_version_says_so(asked: list[str], tmp_path: Path) -> None:
    found = verified(tmp_path, recipe("simulated"))
    assert asked == ["sim"] and not found.holds
    assert found.text == "made with vLLM 0.32.0 (here: 0.33.0); does not hold: on sim"


def test_the_evidences_pool_is_simulated_where_no_flag_gives_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str | None, int, bool | None]] = []

    def simulated(setup: Setup, settings: object, by: object, lab: object) -> dict[str, Any]:
        given = flag_value(setup.engine_args, "num-gpu-blocks-override")
        seen.append((given, setup.pool.block_tokens, setup.simulated.async_scheduling))
        return answer("sim", holds=True)

    monkeypatch.setattr(verifying, "check_engine", lambda: "0.32.0")
    monkeypatch.setattr(verifying, "installed_device", lambda: "cpu")
    monkeypatch.setattr(verifying, "_in_simulation", simulated)
    pool = {"blocks": 900, "block_tokens": 32, "async_scheduling": True}
    with_pool = msgspec.structs.replace(recipe("simulated"), evidence={**EVIDENCE, "pool": pool})
    for one in (with_pool, recipe("simulated")):
        verified(tmp_path, one)
    assert seen == [("900", 32, True), (None, 0, None)]


def test_another_version_is_refused_where_the_recipe_would_be_used(asked: list[str]) -> None:
    with pytest.raises(UsageError, match="has expired") as refused:
        refuse_foreign(recipe(), "r.toml", anyway=False)
    assert "kvtune recipe verify" in refused.value.hint
    refuse_foreign(recipe(), "r.toml", anyway=False, versions=False)


@pytest.mark.parametrize("acts", [True, False])
def test_a_setting_that_this_vllm_does_nothing_with_stands_aside_by_name(
    acts: bool, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[dict[str, Any]] = []

    def measured(_bench: Any, settings: dict[str, Any], *_: Any) -> dict[str, Any]:
        tried.append(settings)
        return answer("engine", holds=True)

    monkeypatch.setattr(verifying, "on_engine", measured)
    monkeypatch.setattr(
        verifying, "without_effect", lambda name: "" if acts or name == "max_num_seqs" else "no such thing"
    )
    engine = {"prefill_schedule_interval": 4, "max_num_seqs": 8}
    one = msgspec.structs.replace(recipe(), engine=engine)
    said = "prefill_schedule_interval=4 has no effect here: no such thing"
    assert usable(one) == (engine if acts else {"max_num_seqs": 8}, [] if acts else [said])
    assert (said in verified(tmp_path, one).text) != acts
    assert tried == [{**(engine if acts else {"max_num_seqs": 8}), "slack": 128}]


def test_its_runs_are_in_a_hidden_folder_that_is_swept_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kvtune runs` and `last` do not see them."""
    seen: list[Path] = []

    def confirmed(bout: Bout, *_: Any, **__: Any) -> None:
        folder = bout.trials.output
        seen.append(folder)
        (folder / "a.kvrun").write_bytes(b"PK")
        assert (folder / MARK).exists()
        assert list(run_files(tmp_path)) == []
        raise KeyboardInterrupt

    monkeypatch.setattr(verifying, "confirm", confirmed)
    with pytest.raises(KeyboardInterrupt):
        verifying.on_engine(
            Setup.of_recipe(recipe(), "r.toml"),
            {},
            objective("hit-rate"),
            2,
            tmp_path,
            lambda trial: None,
        )
    assert seen and not list(tmp_path.iterdir())


GPU = msgspec.structs.replace(
    recipe(),
    recipe=msgspec.structs.replace(recipe().recipe, device="cuda", device_name="NVIDIA H100 80GB HBM3"),
)


@pytest.mark.parametrize(("key", "refused"), [("h100", False), ("l4", True)])
def test_a_recipe_for_another_gpu_is_refused(
    key: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "installed_device", lambda: "cuda")
    monkeypatch.setattr(verifying, "this_platform", lambda: DEVICES[key])
    if refused:
        with pytest.raises(UsageError, match="for NVIDIA H100 80GB HBM3, this machine has NVIDIA L4"):
            refuse_foreign(GPU, "r.toml", anyway=False, versions=False)
        refuse_foreign(GPU, "r.toml", anyway=True, versions=False)
    else:
        refuse_foreign(GPU, "r.toml", anyway=False, versions=False)


def test_a_pool_unlike_the_one_of_the_evidence_is_said() -> None:
    one = msgspec.structs.replace(recipe(), evidence={"pool": {"blocks": 1000, "block_tokens": 16}})
    assert "a pool of 16,000 tokens, this one has 8,000" in other_pool(one, 500, 16)
    assert other_pool(one, 130, 128) == "" and other_pool(recipe(), 500, 16) == ""
