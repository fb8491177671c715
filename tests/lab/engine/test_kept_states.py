"""Kept states on the real engine: hits at the second visit, the same answers as stock, simulated step by step.

Stock cannot cache tiny-granite's prefixes on a CPU: its answers are compared with those of stock without a cache.

Loads on which stock hits nothing before the third visit, because a prompt's last state lies behind the shared prefix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.engine.real import lockstep
from tests.lab.engine.twins import EXACT, TWINS, written

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

FLAGS = ["--max-num-batched-tokens", "1024", "--max-num-seqs", "16", "--max-model-len", "3200"]
FLAGS += ["--skip-tokenizer-init", "--enforce-eager", "--gpu-memory-utilization", "0.1"]
SEEDED = ["--load-format", "kvtune-seeded", "--enable-prefix-caching"]
VISITS = "rounds:prefixes={prefixes},prefix={prefix},suffix={suffix},output=6,rounds=3"
MIX = "mix:prefixes=2,prefix=900,requests=10,cold=600,concurrency=3,output=6"
CHAT = "chat:sessions=3,turns=3,system=64,first={first},user={user},output={output}"
LONG = CHAT.format(first=700, user=300, output=200)
SHORT = CHAT.format(first=300, user=40, output=40)
# The prefix ends whole blocks before the prompt's last one: of 384, of 1,280 and of 32 tokens.
MODELS: dict[str, tuple[dict[str, Any], int, int]] = {
    "tiny-qwen3next": ({"slack": 384, "min_drop": 1}, 768, 780),
    "tiny-granite": ({"slack": 1280, "min_drop": 1, "whole_states": True}, 1280, 1300),
    "lfm2moe": ({"slack": 64, "min_drop": 1}, 700, 64),
}


def run(model: str, loads: list[str], folder: Path, *flags: str, **settings: Any) -> list[Any]:
    """The cases of both cores. Stock's engine cannot cache prefixes of a Mamba-2 model on a CPU."""
    core = {**MODELS[model][0], "keep_states": True, **settings}
    cores = ["kvtune"] if "whole_states" in core else ["stock", "kvtune"]
    name, own = (
        (written(model, folder), ["--block-size", "32", *EXACT]) if model in TWINS else (model, SEEDED)
    )
    cases = [{"workload": load} for load in loads]
    job = {"model": name, "args": [*FLAGS, *own, *flags], "cores": cores, "cases": cases}
    results = lockstep(folder, {**job, "core_settings": core, "audit": True})
    assert results["audits"] and not results["audit_violations"]
    for case in results["cases"]:
        assert case["hits"][0] == case["hits"][1] and min(case["hits"][0]) >= 0, case["workload"]
        assert case["digests"][0] == case["digests"][1], case["workload"]
    found: list[Any] = results["cases"]
    return found


@pytest.mark.parametrize("prefixes", [15, 30, 40])
@pytest.mark.parametrize("model", MODELS)
def test_the_second_visit_hits_and_answers_are_stocks(model: str, prefixes: int, tmp_path: Path) -> None:
    _, prefix, suffix = MODELS[model]
    visits = VISITS.format(prefixes=prefixes, prefix=prefix, suffix=suffix)
    answers: dict[str, list[list[int]]] = {}
    for case in run(model, [visits, MIX, SHORT if model in TWINS else LONG], tmp_path):
        assert answers.setdefault(case["workload"], case["answers"]) == case["answers"], case["workload"]
        if case["workload"] == visits:
            first, second, third = (case["hits"][0][i * prefixes : (i + 1) * prefixes] for i in range(3))
            assert not sum(first) and sum(third)
            if case["core"] == "stock":
                assert not sum(second)
            else:
                assert second == third and min(second) > 0
    assert len({tuple(answer) for answer in answers[visits]}) > 1


@pytest.mark.parametrize("prefixes", [15, 30, 40])
def test_answers_from_kept_states_are_those_of_stock_without_a_cache(prefixes: int, tmp_path: Path) -> None:
    """In 32 bits: in 16, a prompt computed in other chunks may round to another token, with a cache or without."""
    settings, prefix, suffix = MODELS["tiny-granite"]
    loads = [VISITS.format(prefixes=prefixes, prefix=prefix, suffix=suffix), MIX, LONG]
    answers = []
    for core, caching in (("stock", "--no-enable-prefix-caching"), ("kvtune", "--enable-prefix-caching")):
        folder = tmp_path / core
        folder.mkdir()
        flags = [*FLAGS, "--load-format", "kvtune-seeded", "--dtype", "float32", caching]
        job = {"model": "tiny-granite", "args": flags, "cores": [core]}
        job |= {"cases": [{"workload": load} for load in loads], "audit": True}
        cases = lockstep(folder, {**job, "core_settings": {**settings, "keep_states": True}})["cases"]
        answers.append([case["answers"] for case in cases])
        assert (sum(map(sum, cases[0]["hits"])) > 0) == (core == "kvtune")
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0][0]}) > prefixes


def test_an_answers_state_is_the_one_that_stock_keeps_at_an_interval(tmp_path: Path) -> None:
    """With states that decoding made, answers differ from those of a prompt computed anew, in stock as here."""
    interval, folder = tmp_path / "interval", tmp_path / "kept"
    interval.mkdir()
    folder.mkdir()
    dense = run("tiny-qwen3next", [LONG], interval, "--prefix-cache-retention-interval", "384")
    stock, ours = run("tiny-qwen3next", [LONG], folder, output_states=True)
    assert dense[0]["core"] == "stock"
    assert ours["hits"] == dense[0]["hits"] and sum(ours["hits"][0]) > sum(stock["hits"][0])
    assert ours["answers"] == dense[0]["answers"]
