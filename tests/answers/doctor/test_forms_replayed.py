"""doctor's closed forms against replays of other lengths than it drew, for hybrids with and without drafts."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvtune.answers.doctor.facts import Facts
from kvtune.answers.doctor.model import ask_vllm
from kvtune.data.platforms import DEVICES
from kvtune.lab.setup.setup import Setup
from kvtune.requests.loads.spec import build
from tests.simulator import SHARED

pytestmark = [pytest.mark.vllm, pytest.mark.full, pytest.mark.timeout(600)]

H100 = DEVICES["h100"]
CONFIGS = Path(__file__).parents[2] / "data" / "layout" / "configs"
FLAGS = ["--kv-cache-memory-bytes", "80000000000", "--max-model-len", "65536"]
MTP = ["--speculative-config", '{"method":"mtp","num_speculative_tokens":1}']
UNIT = ["--prefix-match-unit", "32"]
HASH_TOKENS = 512  # of a trace's hash ids
SHAPES: list[tuple[str, list[str]]] = [
    ("qwen3-next-80b", []),
    ("qwen3-next-80b", UNIT),
    ("qwen3-next-80b", MTP),
    ("qwen3-next-80b", [*MTP, *UNIT]),
    ("qwen3.5-27b", []),
    ("qwen3.5-27b", MTP),
    ("nemotron-3-nano", []),
    ("nemotron-3-super", MTP),
    ("granite-4.0-h-tiny", []),
    ("lfm2.5-8b-a1b", []),
    ("jamba-1.5-mini", []),
]


def sent(path: Path, prompts: list[tuple[int, list[int]]]) -> str:
    """A trace of prompts, each with its length and hash ids, one after another."""
    rows: list[dict[str, Any]] = [
        {"timestamp": 100_000 * n, "input_length": tokens, "output_length": 2, "hash_ids": ids}
        for n, (tokens, ids) in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"trace:path={path}"


def replayed(setup: Setup, spec: str) -> list[int]:
    with SHARED.simulators(setup.model, H100) as simulators:
        run = simulators.replay(setup.sized().with_load(build(spec)))
    return [int(hits) for hits in run.table("requests")["hit_tokens"]]


def folder_of(name: str, folder: Path) -> str:
    config = CONFIGS / f"{name}.json"
    if not name.startswith("jamba"):
        return name
    (folder / "config.json").write_bytes(config.read_bytes())
    return str(folder)


@pytest.mark.parametrize(
    ("name", "flags"), SHAPES, ids=lambda each: each if isinstance(each, str) else " ".join(each)[:60]
)
def test_the_closed_forms_hold_at_lengths_that_doctor_did_not_draw(
    name: str, flags: list[str], tmp_path: Path
) -> None:
    model = folder_of(name, tmp_path)
    more = ["--skip-tokenizer-init"] if model != name else []
    setup = Setup(model=model, engine_args=[*FLAGS, *flags, *more], platform=H100)
    facts: Facts = ask_vllm(setup)
    assert facts.again is not None and facts.shared is not None
    block, drawn = facts.block_tokens, Random(f"{name} {flags}")
    times = min(6, 40_000 // block)
    lengths = [drawn.randrange(1, times * block) for _ in range(8)] + [block, times * block // 2 + 1]
    prompts = []
    for number, tokens in enumerate(lengths):
        ids = [1000 * (number + 1) + n for n in range(-(-tokens // HASH_TOKENS))]
        prompts += [(tokens, ids)] * 2
    hits = replayed(setup, sent(tmp_path / "again.jsonl", prompts))[1::2]
    assert hits == [facts.again.hits(tokens) for tokens in lengths]
    assert any(hits)

    prefixes = [HASH_TOKENS * drawn.randrange(1, max(2, times * block // HASH_TOKENS)) for _ in range(5)]
    rest = block // HASH_TOKENS + 2
    prompts = []
    for number, tokens in enumerate(prefixes):
        ids = [100_000 * (number + 1) + n for n in range(tokens // HASH_TOKENS)]
        prompts += [
            (
                tokens + rest * HASH_TOKENS,
                [*ids, *(100_000 * (number + 1) + 1000 * (v + 1) + n for n in range(rest))],
            )
            for v in range(3)
        ]
    third = replayed(setup, sent(tmp_path / "shared.jsonl", prompts))[2::3]
    assert third == [facts.shared.hits(tokens) for tokens in prefixes]
