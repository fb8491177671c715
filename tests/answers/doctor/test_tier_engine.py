"""What doctor says of a tier before it is bought, against a real engine: bytes mapped, blocks stored, tokens loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtune.answers.doctor.model import examine_model
from kvtune.answers.doctor.tier import ANSWER, SUFFIX, Rules, tier_of
from kvtune.reading.analysis.offload import offload
from tests.lab.engine.real import lockstep, profiled
from tests.lab.engine.test_twins import FLAGS
from tests.lab.engine.twins import drafting, written

pytestmark = [
    pytest.mark.engine,
    pytest.mark.full,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]

TIER = 0.25
BLOCKS_OF_32 = ["--block-size", "32", "--max-num-batched-tokens", "512", "--max-num-seqs", "4"]
PLAIN = [*BLOCKS_OF_32, "--max-model-len", "4000"]
STATES = ["--max-num-batched-tokens", "1024", "--max-num-seqs", "4", "--max-model-len", "6000"]
Made = Callable[[Path], tuple[str, list[str]]]
LAYOUTS: dict[str, tuple[Made, list[str], int, int, tuple[int, ...]]] = {
    "full": (lambda _: ("tiny-llama", []), PLAIN, 200, 14, (732, 1024)),
    "windows": (lambda _: ("tiny-gemma3", []), PLAIN, 260, 16, (732, 1600)),
    "windows at an interval": (
        lambda _: ("tiny-gemma3", ["--prefix-cache-retention-interval", "1024"]),
        PLAIN,
        260,
        16,
        (1600,),
    ),
    "states": (lambda _: ("tiny-qwen3next", []), STATES, 60, 12, (956, 1024)),
    "latent": (
        lambda folder: (written("deepseek", folder), ["--max-num-batched-tokens", "2400"]),
        FLAGS,
        300,
        8,
        (700, 1024),
    ),
    "windows and drafts": (lambda folder: drafting("gptoss", "eagle3", folder), FLAGS, 80, 12, (700, 960)),
}
"""By layout: the model and its own flags, flags, blocks of the pool, prompts that empty it, lengths of the prompt."""


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_blocks_and_loads_are_the_real_engines(name: str, tmp_path: Path) -> None:
    made, flags, blocks, others, lengths = LAYOUTS[name]
    model, own = made(tmp_path)
    args = [*flags, *own]
    report, _ = examine_model(model, [flag for flag in args if flag not in UNASKED], ask=True)
    rules, expected, cases = Rules.of(report), [], []
    for tokens in lengths:
        longer = tokens + rules.unit + SUFFIX
        begun, churn = [(1, 0, tokens)], [[(900 + number, 0, 900)] for number in range(others)]
        parted, other = ([*begun, (stream, 0, longer - tokens)] for stream in (3, 4))
        sent = {
            "alone": ([begun], 0),
            "again": ([begun, *churn, begun], rules.loaded(tokens, tokens, tokens)),
            "turn": (
                [begun, *churn, [*begun, (2, 0, ANSWER + SUFFIX)]],
                rules.loaded(tokens, tokens, tokens + ANSWER + SUFFIX),
            ),
            "shared": ([parted, *churn, other], rules.loaded(longer, tokens, longer)),
        }
        for what, (prompts, loaded) in sent.items():
            stored = sum(len(rules.stored(group, tokens)) for group in rules.groups)
            cases.append({"workload": f"{tokens} {what}", "spans": prompts, "output": 8, "blocks": blocks})
            expected.append((stored if what == "alone" else None, loaded, rules.load_bytes(loaded)))
    job = {
        "model": model,
        "cores": ["stock"],
        "args": [*args, "--kv-offloading-size", str(TIER)],
        "cases": cases,
    }
    # vLLM turns prefix caching off for MLA on a CPU, and a simulator's requests have no hashes then.
    results = lockstep(tmp_path, job | {"real_only": not report.caching})["cases"]
    for case, (stored, loaded, copied) in zip(results, expected, strict=True):
        copies = case["copies"][0]
        assert stored in (None, copies["stored_chunks"]), case["workload"]
        assert (loaded, copied) == (case["tier_hits"][0][-1], copies["loaded_bytes"]), case["workload"]
    assert sum(loaded for _, loaded, _ in expected) > 0
    tier = tier_of(report, report.block_bytes, int(TIER * (1 << 30)))
    assert results[0]["tier_chunks"] == tier.blocks and results[0]["tier_bytes"] == tier.mapped_bytes


UNASKED = ("--load-format", "kvtune-seeded")
"""The tests' weights, which the child that asks vLLM does not know."""


def test_two_ranks_map_and_store_as_said(tmp_path: Path) -> None:
    """Rounds of four prefixes of 700 tokens in a pool of 40 blocks: each comes back from the tier."""
    flags = ["--tensor-parallel-size", "2", *BLOCKS_OF_32, "--max-model-len", "1000"]
    report, _ = examine_model("tiny-llama", flags, ask=True)
    tier, rules = tier_of(report, report.block_bytes, int(TIER * (1 << 30))), Rules.of(report)
    assert tier.ranks == 2
    load = "rounds:prefixes=4,prefix=700,suffix=40,output=8,rounds=2"
    engine = (*flags, "--kv-offloading-size", str(TIER), "--num-gpu-blocks-override", "40")
    ran = profiled(tmp_path, "tiny-llama", "-w", load, "--core", "stock", engine=engine)
    measured = offload(ran.run)
    assert measured is not None and measured.copies is not None
    assert measured.tier_chunks == tier.blocks
    whole, shared = (len(rules.stored(rules.groups[0], tokens)) for tokens in (740, 700))
    assert measured.copies.stored_chunks == 4 * whole + 4 * (whole - shared)
    assert measured.tier_hit_tokens == 4 * rules.loaded(740, 700, 740)
    assert measured.copies.loaded_bytes == 4 * tier.ranks * rules.load_bytes(rules.loaded(740, 700, 740))
