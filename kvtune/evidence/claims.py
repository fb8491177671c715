"""The published results on vLLM's KV cache: which figure of which case each claim is about, and what was published.

Plain data, any process. `cases.py` has the cases, for a CPU engine and for a GPU; `runs.py` runs them,
`evidence/judge.py` judges.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from kvtune.legal import Value

Direction = Literal["higher", "lower", "equal"]


@dataclass(frozen=True, slots=True)
class CaseSide:
    """One way to run a case; `settings` are core settings. The stock side has the core not loaded at all."""

    name: str
    settings: dict[str, Value] = field(default_factory=dict)
    core: Literal["kvtune", "stock"] = "kvtune"
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """Work that all sides do `repeats` times, each on a fresh engine. With `turns`, all engines are loaded
    at once and do it that often in turns (turns.py)."""

    name: str
    model: str
    workload: str
    sides: tuple[CaseSide, ...]
    repeats: int
    args: tuple[str, ...] = ()
    turns: int = 0


@dataclass(frozen=True, slots=True)
class ClaimFigure:
    """One figure of a claim: `measure` of side `b` over that of side `a`; `published` is that ratio, if given."""

    case: str
    a: str
    b: str
    measure: str  # dotted path in a run's summary
    title: str
    direction: Direction
    published: float | None = None
    count: bool = False
    """The figure is the same in every run (a block size, for instance), so one run is enough."""


@dataclass(frozen=True, slots=True)
class Claim:
    name: str
    title: str
    published: str
    figures: tuple[ClaimFigure, ...]


THROUGHPUT, GEN0 = "throughput_tok_s", "gc.engine_core.collections.0"
PAUSE, TTFT2 = "gc.engine_core.pause_ms.total", "rounds.1.ttft_ms_mean"
TTFT3, HITS3 = "rounds.2.ttft_ms_mean", "rounds.2.hit_tokens"

CLAIMS = (
    Claim(
        "empty-blocks",
        "Empty block lists shared instead of allocated",
        "collector's cost down, throughput +3 to 4 % (opt-125m, 48/2000 and 2000/48)",
        (
            ClaimFigure("decode-heavy", "fresh lists", "shared list", THROUGHPUT, "tokens/s", "higher", 1.03),
            ClaimFigure(
                "decode-heavy",
                "fresh lists",
                "stock",
                THROUGHPUT,
                "tokens/s, stock (has adopted it)",
                "higher",
                1.03,
            ),
            ClaimFigure("decode-heavy", "fresh lists", "shared list", PAUSE, "collector's pauses", "lower"),
            ClaimFigure(
                "prefill-heavy", "fresh lists", "shared list", THROUGHPUT, "tokens/s, prefill", "higher", 1.03
            ),
        ),
    ),
    Claim(
        "token-rows",
        "Sampled tokens as arrays instead of lists of lists",
        "throughput +30 % (opt-125m, 48/2000), +5 % (48/500), +6 % (8B)",
        (
            ClaimFigure("decode-heavy", "stock", "arrays", THROUGHPUT, "tokens/s", "higher", 1.30),
            ClaimFigure("decode-short", "stock", "arrays", THROUGHPUT, "tokens/s", "higher", 1.05),
            ClaimFigure("decode-heavy", "stock", "arrays", GEN0, "young collections", "lower"),
            ClaimFigure("decode-heavy", "stock", "arrays", PAUSE, "collector's pauses", "lower"),
        ),
    ),
    Claim(
        "pinning",
        "Sliding-window blocks pinned in a second tier",
        "30 prefixes of 28k tokens: first token -78 %, throughput +28 %; equal at 15; min-drop 16 like 0",
        (
            ClaimFigure(
                "many prefixes",
                "stock",
                "pin",
                TTFT2,
                "first token, round 2, published policy",
                "lower",
                0.22,
            ),
            ClaimFigure(
                "many prefixes", "stock", "first", TTFT2, "first token, round 2, our default", "lower", 0.22
            ),
            ClaimFigure("many prefixes", "stock", "first", THROUGHPUT, "tokens/s", "higher", 1.28),
            ClaimFigure(
                "half the prefixes",
                "stock",
                "first",
                TTFT3,
                "half the prefixes, round 3",
                "equal",
                1.0,
            ),
            ClaimFigure(
                "many prefixes",
                "pin, min-drop 0",
                "pin",
                TTFT2,
                "min-drop 16 against 0, round 2",
                "equal",
                1.0,
            ),
        ),
    ),
    Claim(
        "free-list",
        "Prefix caching with O(1) removal from the free list",
        "a hit costs the same in a pool of any size",
        (
            ClaimFigure(
                "large pool",
                "linear list",
                "linked list",
                "host_us.schedule",
                "EngineCore's schedule() a step, large pool of cached blocks",
                "lower",
            ),
            ClaimFigure("large pool", "linear list", "linked list", TTFT3, "first token, round 3", "lower"),
        ),
    ),
    Claim(
        "aggregate-blocks",
        "Block size from all attention layers together (hybrid attention + state-space models)",
        "blocks of about 400 tokens down to about 100",
        (
            ClaimFigure(
                "hybrid",
                "stock's blocks",
                "packed",
                "engine.block_size",
                "tokens a block",
                "lower",
                0.25,
                True,
            ),
            ClaimFigure(
                "hybrid", "stock's blocks", "packed", HITS3, "hit tokens, round 3", "higher", None, True
            ),
        ),
    ),
)
