"""A pool's size in words: what a device's memory gave it is never printed as an engine's answer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kvtune
from kvtune.data.platforms import BY_MEMORY
from kvtune.data.run.types import EngineInfo

PACKAGE = Path(kvtune.__file__).parent
COUNTED = {"num_blocks", "pool_blocks"}
OTHERS = {
    "data/run/types.py": "the gate itself",
    "reading/bounds/document.py": "sizes that --pools names",
    "answers/doctor/rules.py": "vLLM's answer for a size that a flag gives",
    "answers/doctor/document.py": "vLLM's answer for a size that a flag gives",
    "servers/watch/document.py": "a server's own count",
}


def engine(*blocks: int, **settings: int) -> EngineInfo:
    groups = [{"block_size": block} for block in blocks]
    return EngineInfo(block_size=min(blocks), num_blocks=165_094, groups=groups, settings=settings)


def test_a_pool_that_memory_sizes_says_what_it_assumes() -> None:
    sized = EngineInfo(block_size=16, num_blocks=165_094, origins={"num_blocks": BY_MEMORY})
    assert sized.pool == (
        "165,094 blocks of 16 tokens, as if a step's activations and CUDA graphs took no memory"
    )
    assert engine(16, 16).pool == "165,094 blocks of 16 tokens"


def test_groups_with_blocks_of_their_own_are_named_with_the_unit_of_hits() -> None:
    said = engine(64, 256, 4, 8, 4, hit_alignment_tokens=256).pool
    assert said == "165,094 blocks of 4, 8, 64 or 256 tokens by KV group, hits in multiples of 256"


def test_the_pools_tokens_are_those_that_every_group_keeps() -> None:
    assert engine(16, 16).pool_tokens == 165_094 * 8
    assert engine(32, 16, 16).pool_tokens == int(165_094 / (1 / 32 + 2 / 16))
    assert EngineInfo(block_size=16, num_blocks=10).pool_tokens == 160
    assert EngineInfo().pool_tokens == 0


@pytest.mark.lint
def test_no_other_text_counts_an_engines_blocks() -> None:
    """Whoever writes a number of blocks takes `EngineInfo.pool`, which says what the number assumes."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for text in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.JoinedStr)):
            names = {n.attr for n in ast.walk(text) if isinstance(n, ast.Attribute)}
            names |= {n.id for n in ast.walk(text) if isinstance(n, ast.Name)}
            names |= {n.value for n in ast.walk(text) if isinstance(n, ast.Constant) and n.value in COUNTED}
            if names & COUNTED:
                found.add(path.relative_to(PACKAGE).as_posix())
    assert found == set(OTHERS)
