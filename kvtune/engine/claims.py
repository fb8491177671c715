"""The published results on vLLM's KV cache, as runs: on which work, which sides beside each other, how often.

Plain data, any process. Sizes are scaled to a CPU engine: tiny models, whose time is the host's, and a pool that
stands to the prefixes as the published one did. `evidence.py` runs it, `analysis/evidence.py` judges it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

OFF = dict.fromkeys(("pool", "pinning", "reuse", "rows", "steady", "empty_blocks", "freeze"), False)
"""The core with none of its ideas: what a side turns on again is all that it differs in."""

Direction = Literal["higher", "lower", "equal"]


@dataclass(frozen=True, slots=True)
class Side:
    """One way to run a case; `settings` are core settings. The stock side has the core not loaded at all."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    core: Literal["kvtune", "stock"] = "kvtune"
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """Work that all sides do in turn, `repeats` times."""

    name: str
    model: str
    workload: str
    sides: tuple[Side, ...]
    repeats: int
    args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Asked:
    """One figure of a claim: `measure` of side `b` over that of side `a`; `published` is that ratio, if given."""

    case: str
    a: str
    b: str
    measure: str  # dotted path in a run's summary
    title: str
    direction: Direction
    published: float | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    name: str
    title: str
    published: str
    figures: tuple[Asked, ...]


STOCK = Side("stock", core="stock")
FRESH = Side("fresh lists", {**OFF, "legacy_empty_blocks": True})
SHARED = Side("shared list", {**OFF, "empty_blocks": True})
ROWS = Side("arrays", {**OFF, "rows": True})
TIERED = Side("tiered")
PIN = Side("pin", {"policy": "pin"})
PIN_ALL = Side("pin, min-drop 0", {"policy": "pin", "min_drop": 0})

POOL = ("--num-gpu-blocks-override", "2600", "--block-size", "32", "--max-num-batched-tokens", "1024")

CASES = {
    case.name: case
    for case in (
        Case(
            "decode-heavy",
            "tiny-opt",
            "decode:requests=512,prompt=48,output=250",
            (STOCK, FRESH, SHARED, ROWS),
            3,
            ("--max-num-seqs", "512"),
        ),
        Case(
            "decode-short",
            "tiny-opt",
            "decode:requests=512,prompt=48,output=60",
            (STOCK, ROWS),
            3,
            ("--max-num-seqs", "512"),
        ),
        Case(
            "prefill-heavy",
            "tiny-opt",
            "prefill:requests=96,prompt=1900,output=48",
            (STOCK, FRESH, SHARED),
            3,
        ),
        Case(
            "24 prefixes",
            "tiny-gemma3",
            "rounds:prefixes=24,prefix=1500,suffix=64,output=16,rounds=2",
            (STOCK, PIN, PIN_ALL, TIERED),
            2,
            POOL,
        ),
        Case(
            "12 prefixes",
            "tiny-gemma3",
            "rounds:prefixes=12,prefix=1500,suffix=64,output=16,rounds=3",
            (STOCK, TIERED),
            2,
            POOL,
        ),
        Case(
            "caching",
            "tiny-opt",
            "rounds:prefixes=16,prefix=1500,suffix=32,output=16,rounds=3",
            (STOCK, Side("no caching", core="stock", args=("--no-enable-prefix-caching",))),
            2,
        ),
    )
}

THROUGHPUT, GEN0 = "throughput_tok_s", "gc.engine_core.collections.0"
PAUSE, TTFT2, HITS2 = "gc.engine_core.pause_ms.total", "rounds.1.ttft_ms_mean", "rounds.1.hit_tokens"

CLAIMS = (
    Claim(
        "empty-blocks",
        "Empty block lists shared instead of allocated",
        "collector's cost down, throughput +3 to 4 % (opt-125m, 48/2000 and 2000/48)",
        (
            Asked("decode-heavy", "fresh lists", "shared list", THROUGHPUT, "tokens/s", "higher", 1.03),
            Asked(
                "decode-heavy",
                "fresh lists",
                "stock",
                THROUGHPUT,
                "tokens/s, stock (has adopted it)",
                "higher",
                1.03,
            ),
            Asked("decode-heavy", "fresh lists", "shared list", PAUSE, "collector's pauses", "lower"),
            Asked("prefill-heavy", "fresh lists", "shared list", THROUGHPUT, "tokens/s", "higher", 1.03),
        ),
    ),
    Claim(
        "token-rows",
        "Sampled tokens as arrays instead of lists of lists",
        "throughput +30 % (opt-125m, 48/2000), +5 % (48/500), +6 % (8B)",
        (
            Asked("decode-heavy", "stock", "arrays", THROUGHPUT, "tokens/s", "higher", 1.30),
            Asked("decode-short", "stock", "arrays", THROUGHPUT, "tokens/s", "higher", 1.05),
            Asked("decode-heavy", "stock", "arrays", GEN0, "young collections", "lower"),
            Asked("decode-heavy", "stock", "arrays", PAUSE, "collector's pauses", "lower"),
        ),
    ),
    Claim(
        "pinning",
        "Sliding-window blocks pinned in a second tier",
        "30 prefixes of 28k tokens: first token -78 %, throughput +28 %; equal at 15; min-drop 16 like 0",
        (
            Asked(
                "24 prefixes", "stock", "pin", TTFT2, "first token, round 2, published policy", "lower", 0.22
            ),
            Asked("24 prefixes", "stock", "tiered", TTFT2, "first token, round 2, our policy", "lower", 0.22),
            Asked("24 prefixes", "stock", "tiered", THROUGHPUT, "tokens/s", "higher", 1.28),
            Asked(
                "12 prefixes",
                "stock",
                "tiered",
                "rounds.2.ttft_ms_mean",
                "half the prefixes, round 3",
                "equal",
                1.0,
            ),
            Asked(
                "24 prefixes", "pin, min-drop 0", "pin", TTFT2, "min-drop 16 against 0, round 2", "equal", 1.0
            ),
        ),
    ),
    Claim(
        "free-list",
        "Prefix caching with O(1) removal from the free list",
        "a hit costs the same in a pool of any size",
        (Asked("caching", "no caching", "stock", TTFT2, "first token, round 2, caching on", "lower"),),
    ),
)
