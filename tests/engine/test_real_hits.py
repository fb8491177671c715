"""Hits of stock vLLM and of kvtune's core on the real engine, and equal answers. Two engine starts, shared."""

from __future__ import annotations

import pytest

from tests.engine.real import Ran, counts_as_vllm, profiled

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(600)]

ROUNDS = "rounds:prefixes=4,prefix=1536,suffix=64,output=8,rounds=3"
ALL = 4 * 1536
ROUNDS_ENGINE = (
    "--num-gpu-blocks-override",
    "8000",
    "--block-size",
    "32",
    "--max-num-batched-tokens",
    "2048",
)


@pytest.fixture(scope="module")
def rounds_stock(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return profiled(
        tmp_path_factory.mktemp("rounds-stock"),
        "tiny-gemma3", "-w", ROUNDS, "--core", "stock",
        engine=ROUNDS_ENGINE,
    )  # fmt: skip


@pytest.fixture(scope="module")
def rounds_kvtune(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return profiled(
        tmp_path_factory.mktemp("rounds-kvtune"), "tiny-gemma3", "-w", ROUNDS, engine=ROUNDS_ENGINE
    )


def hits_by_round(ran: Ran) -> list[int]:
    return [r["hit_tokens"] for r in ran.facts["rounds"]]


def test_stocks_default_hits_at_the_third_visit_only(rounds_stock: Ran) -> None:
    assert hits_by_round(rounds_stock) == [0, 0, ALL]


def test_the_core_hits_from_the_second_visit_on(rounds_kvtune: Ran) -> None:
    assert rounds_kvtune.facts["core"]["name"] == "kvtune"
    assert rounds_kvtune.run.header.core.active, rounds_kvtune.run.header.core.why
    first, second, third = hits_by_round(rounds_kvtune)
    assert first == 0
    assert min(second, third) >= 0.98 * ALL


def test_the_core_answers_as_stock_does(rounds_stock: Ran, rounds_kvtune: Ran) -> None:
    answers = [ran.run.table("requests")["answer_crc"].tolist() for ran in (rounds_stock, rounds_kvtune)]
    assert all(answers[0]) and len(set(answers[0])) > 4
    assert answers[0] == answers[1]
    assert rounds_stock.facts["output_tokens"] == rounds_kvtune.facts["output_tokens"] == 12 * 8
    assert rounds_stock.facts["workload"]["hash"] == rounds_kvtune.facts["workload"]["hash"]


def test_the_front_ends_counts_agree_with_vllms(rounds_stock: Ran, rounds_kvtune: Ran) -> None:
    counts_as_vllm(rounds_stock)
    counts_as_vllm(rounds_kvtune)
