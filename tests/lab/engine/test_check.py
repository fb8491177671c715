"""`kvtune check` against real servers: stock vLLM and kvtune's core answer as cold, and each planted fault is found.

`python -m bench.checks` does the same ten times and more, with other prompts each time.
"""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvtune.answers.check.paths import KERNEL
from kvtune.answers.tune.answers import checked
from kvtune.base.clock import Clock
from kvtune.lab.engine.profile import EngineBench
from kvtune.lab.setup.setup import Setup
from kvtune.plugin.core.plugin import MODULES
from tests.faults.kvtune_test_faults import VARIABLE
from tests.lab.engine.checked import (
    ADAPTERS,
    FAULTS,
    FORGOTTEN,
    PLANTS,
    ROUNDED,
    SERVERS,
    check,
    plant,
    server,
    wrong,
)
from tests.weights.kvtune_test_weights import LOAD_FORMAT

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1500)]

ENOUGH, SLOW = 22, 6
"""Prompts after which a path is as cold, if each exchanged block is told; those of a model that takes minutes."""
ALONE = {
    "pool": ("full", "windows", "windows, experts"),
    "states": ("states (GDN)",),
    "decode": ("full", "windows"),
    "outputs": ("full", "windows"),
    "layout": ("states (GDN)", "states (Mamba-2)"),
}
"""Parts of the core, and layouts for which each does something."""
WHOLE = ("full", "windows", "states (GDN)", "states (Mamba-2)", "host tier")
PACKED = "states (Mamba-2)"


def only(part: str) -> str:
    """The settings with which one part of the core is on."""
    switches = {switch: each.part == part for each in MODULES.values() for switch in each.switches}
    return json.dumps(switches | {"pool": part in ("pool", "states")})  # only the core's pool keeps states


def prompts(name: str) -> int:
    return SLOW if name.startswith("states (GDN)") else ENOUGH


def as_cold(answer: dict[str, Any], asked: int) -> None:
    """No hit is wrong, and paths that were shown often enough are as cold."""
    shown = wrong(answer)
    assert {"whole", "junction"} <= set(shown) and not any(each for each, _ in shown.values())
    told = answer["exchanged"]
    assert told["wrong"] == told["hits"] == asked, "the answers say too little of their prompts"
    verdict = "as cold" if asked >= ENOUGH else "cannot tell"
    assert {each["verdict"] for each in answer["paths"] if each["hits"] == asked} == {verdict}


@pytest.mark.parametrize("name", SERVERS)
def test_hits_of_stock_answer_as_cold(name: str, tmp_path: Path) -> None:
    with server(tmp_path, name) as base:
        _, answer = check(base, "--prompts", str(prompts(name)), "--fill")
    as_cold(answer, prompts(name))
    shown = set(wrong(answer))
    assert "shortest" in shown or name in ("windows of other heads", "draft model")
    assert "full" in shown and (name != "windows" or "edge" in shown)
    assert ({"tier", "mixed"} <= shown) == answer["layout"]["tier"] == (name == "host tier")


def test_a_fault_of_vllm_is_found(tmp_path: Path) -> None:
    """0.32 on a CPU: chunks end at multiples of 128, and hits take their states for those of whole blocks."""
    with server(tmp_path, FORGOTTEN, KVTUNE_AVX512_BF16="1") as base:
        code, answer = check(base, "--prompts", str(SLOW))
    assert (code, answer["verdict"]) == (1, "differs") and wrong(answer)["whole"][0] == 0
    assert answer["common"].startswith("all where the path is a prompt of several chunks")


def test_hits_inside_a_kernels_chunk_are_rounded_otherwise(tmp_path: Path) -> None:
    """As cold answers are that are cut there. Without a fault, other hits are equal to the bit."""
    with server(tmp_path, ROUNDED) as base:
        _, answer = check(base, "--prompts", str(SLOW))
    assert {each["cached"] % KERNEL for each in answer["differ"]} <= {KERNEL // 2}
    assert {each["path"] for each in answer["differ"]} <= {"inside"}


@pytest.mark.parametrize("switch", ["whole_states", "keep_states"])
def test_the_core_mends_it(switch: str, tmp_path: Path) -> None:
    setting = {"KVTUNE_AVX512_BF16": "1", "KVTUNE_SET": json.dumps({switch: True})}
    with server(tmp_path, FORGOTTEN, core="kvtune", **setting) as base:
        _, answer = check(base, "--prompts", str(SLOW))
    as_cold(answer, SLOW)
    assert wrong(answer)["long"] == (0, SLOW)


@pytest.mark.parametrize("name", WHOLE)
def test_hits_of_the_core_answer_as_cold(name: str, tmp_path: Path) -> None:
    settings = {"packed": name == PACKED}
    with server(tmp_path, name, core="kvtune", KVTUNE_SET=json.dumps(settings)) as base:
        _, answer = check(base, "--prompts", str(prompts(name)), "--fill")
    as_cold(answer, prompts(name))


@pytest.mark.parametrize(("part", "name"), [(part, name) for part, names in ALONE.items() for name in names])
def test_hits_of_each_part_of_the_core_alone_answer_as_cold(part: str, name: str, tmp_path: Path) -> None:
    with server(tmp_path, name, core="kvtune", KVTUNE_SET=only(part)) as base:
        _, answer = check(base, "--prompts", str(prompts(name)))
    as_cold(answer, prompts(name))


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_in_the_cache_is_found(name: str, tmp_path: Path) -> None:
    plant(tmp_path, "")
    with server(tmp_path, name) as base:
        for fault in FAULTS[name]:
            plant(tmp_path, fault)
            code, answer = check(base, "--prompts", "12" if fault == "one_in_20" else "6")
            assert (code, answer["verdict"]) == (1, "differs"), fault
            found, hits = (sum(pair[i] for pair in wrong(answer).values()) for i in (0, 1))
            assert answer["cold"]["wrong"] == 0
            if fault == "salt":
                assert answer["unsalted"]
            elif fault == "one_in_20":
                assert 1 <= found <= 8
            else:
                assert found >= 0.9 * hits, fault


@pytest.mark.parametrize("fault", ["", "other"])
def test_a_winners_server_is_checked_and_ends(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(tmp_path, fault)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "fault"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PLANTS, os.environ.get("PYTHONPATH", "")]))
    flags = ["--load-format", LOAD_FORMAT, "--num-gpu-blocks-override", "450", "--block-size", "32"]
    setup = Setup(model="tiny-opt", engine_args=flags, core="kvtune")
    wrong, told = checked(setup, EngineBench(tmp_path, probe="off"), Clock())
    assert wrong == bool(fault) and ("hits differ" if fault else "answer as cold") in told, told
    assert not psutil.Process().children(recursive=True)


def test_an_adapter_that_shares_the_base_models_blocks_is_not_seen(tmp_path: Path) -> None:
    """A check asks the base model alone. The fault is there: an adapter hits what the base model computed."""
    plant(tmp_path, "adapter")
    with server(tmp_path, ADAPTERS) as base:

        def cached(model: str) -> int:
            body = {"model": model, "prompt": list(range(10, 210)), "max_tokens": 1, "cache_salt": "a"}
            asked = urllib.request.Request(f"{base}/v1/completions", json.dumps(body).encode())
            asked.add_header("Content-Type", "application/json")
            usage = json.load(urllib.request.urlopen(asked, timeout=60))["usage"]
            return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

        assert (cached("tiny-llama"), cached("adapter")) == (0, 192)
        code, answer = check(base, "--prompts", "6")
    assert code == 3 and not any(each for each, _ in wrong(answer).values())
