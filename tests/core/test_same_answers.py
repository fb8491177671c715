"""The core answers as stock does on the real engine: every built-in model, under hits and preemptions.

Greedy, eight requests at a time, a pool that does not hold what they grow to. Each model is two engine starts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.engine import models
from tests.engine.real import Ran, profiled

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(900)]

LOAD = "zipf:prefixes=4,prefix={prefix},suffix=40,output=120,requests=24,s=0.8,concurrency=8"
# Seeded weights of real scale: with dummy ones some models answer everything alike.
FLAGS = ("--max-num-batched-tokens", "512", "--max-model-len", "2560", "--load-format", "kvtune-seeded")
POOLS = {  # prefix tokens, and blocks for about four of the eight requests
    "tiny-opt": (700, ("--block-size", "32", "--num-gpu-blocks-override", "90")),
    "tiny-llama": (700, ("--block-size", "32", "--num-gpu-blocks-override", "90")),
    "tiny-gemma3": (700, ("--block-size", "32", "--num-gpu-blocks-override", "340")),
    "tiny-qwen3next": (1800, ("--num-gpu-blocks-override", "24")),
    "tiny-granite": (2000, ("--num-gpu-blocks-override", "12", "--enable-prefix-caching")),
}
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'


def both(model: str, folder: Path, *more: str) -> dict[str, Ran]:
    prefix, pool = POOLS[model]
    by_core = {}
    for core, settings in (("stock", ()), ("kvtune", core_settings(model))):
        output = folder / core
        output.mkdir()
        arguments = (model, "-w", LOAD.format(prefix=prefix), "--core", core, *settings)
        by_core[core] = profiled(output, *arguments, engine=(*FLAGS, *pool, *more))
    return by_core


def core_settings(model: str) -> tuple[str, ...]:
    # With prefix caching on, Mamba-2 on the CPU needs chunks that end where a state is kept.
    return ("--set", "core.whole_states=true") if model == "tiny-granite" else ()


def answers(ran: Ran) -> list[int]:
    checksums: list[int] = ran.run.table("requests")["answer_crc"].tolist()
    return checksums


@pytest.mark.parametrize("model", models.NAMES)
def test_every_model_answers_alike_with_hits_and_preemptions(model: str, tmp_path: Path) -> None:
    ran = both(model, tmp_path)
    assert ran["kvtune"].run.header.core.active, ran["kvtune"].run.header.core.why
    for core, one in ran.items():
        assert one.facts["prefix_cache"]["hit_tokens"] > 0, f"{core}: no hits"
    # Stock's Mamba-2 sets blocks aside for states inside a chunk when it admits: it admits fewer, and preempts none.
    for core in ("kvtune",) if model == "tiny-granite" else ran:
        assert ran[core].run.table("requests")["preemptions"].sum() > 0, f"{core}: no preemptions"
    assert all(answers(ran["stock"])) and len(set(answers(ran["stock"]))) > 4
    assert answers(ran["kvtune"]) == answers(ran["stock"])


def test_with_speculative_decoding_the_steady_path_steps_aside_and_answers_are_the_same(
    tmp_path: Path,
) -> None:
    ran = both("tiny-gemma3", tmp_path, "--speculative-config", NGRAM)
    header = ran["kvtune"].run.header
    assert header.core.active, header.core.why
    assert "steady: speculative decoding" in header.notes
    assert ran["kvtune"].facts["prefix_cache"]["hit_tokens"] > 0
    assert answers(ran["kvtune"]) == answers(ran["stock"])
    assert len(set(answers(ran["stock"]))) > 4
