"""The cases on which the claims of `claims.py` are measured, for a CPU engine and for one GPU. Plain data.

Both scales use the same names. CPU: tiny models, whose time is the host's, and pools in the published proportion to the
prefixes. GPU: real shapes with random weights, and the published lengths where they fit in eight minutes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtune.evidence.claims import Case, CaseSide

OFF = dict.fromkeys(("pool", "pinning", "rows", "steady", "empty_blocks", "freeze"), False)
"""The core with every idea off; a side differs only in what it turns on again."""

STOCK = CaseSide("stock", core="stock")
FRESH = CaseSide("fresh lists", {**OFF, "legacy_empty_blocks": True})
SHARED = CaseSide("shared list", {**OFF, "empty_blocks": True})
ROWS = CaseSide("arrays", {**OFF, "rows": True})
LINKED = CaseSide("linked list", {**OFF})
LINEAR = CaseSide("linear list", {**OFF, "legacy_free_list": True})
OURS = CaseSide("first", {"policy": "first"})
PIN = CaseSide("pin", {"policy": "pin"})
PIN_ALL = CaseSide("pin, min-drop 0", {"policy": "pin", "min_drop": 0})
# On a CPU, stock crashes on Mamba-2 with caching if a chunk ends inside a state; whole_states prevents that.
WHOLE = CaseSide("stock's blocks", {**OFF, "whole_states": True})
PACKED = CaseSide("packed", {**OFF, "packed": True})


@dataclass(frozen=True, slots=True)
class Scale:
    """All cases for one kind of machine; `note` says on the page what the figures were measured on."""

    name: str
    note: str
    cases: dict[str, Case]


def _scale(name: str, note: str, *cases: Case) -> Scale:
    return Scale(name, note, {case.name: case for case in cases})


_SEATS = ("--max-num-seqs", "512")
_POOL = ("--num-gpu-blocks-override", "3800", "--block-size", "32", "--max-num-batched-tokens", "1024")

CPU = _scale(
    "cpu",
    "Tiny models with random weights, sized for a CPU engine, pools and prefixes in the published proportions. "
    "Ratios carry over to a host-bound engine; where a GPU computes for longer, the host's share is smaller.",
    Case(
        "decode-heavy",
        "tiny-opt",
        "decode:requests=512,prompt=48,output=100",
        (STOCK, FRESH, SHARED, ROWS),
        1,
        _SEATS,
        turns=6,
    ),
    Case(
        "prefill-heavy", "tiny-opt", "prefill:requests=32,prompt=1900,output=48", (FRESH, SHARED), 1, turns=6
    ),
    Case(
        "many prefixes",
        "tiny-gemma3",
        "rounds:prefixes=24,prefix=1500,suffix=64,output=16,rounds=2",
        (STOCK, PIN, PIN_ALL, OURS),
        1,
        _POOL,
        turns=4,
    ),
    Case(
        "half the prefixes",
        "tiny-gemma3",
        "rounds:prefixes=12,prefix=1500,suffix=64,output=16,rounds=3",
        (STOCK, OURS),
        1,
        _POOL,
        turns=4,
    ),
    Case(
        "large pool",
        "tiny-opt",
        "rounds:prefixes=24,prefix=1900,suffix=32,output=16,rounds=3",
        (LINKED, LINEAR),
        1,
        ("--num-gpu-blocks-override", "24000", "--block-size", "32"),
        turns=4,
    ),
    Case(
        "hybrid",
        "tiny-granite",
        "rounds:prefixes=6,prefix=1500,suffix=64,output=16,rounds=3",
        (WHOLE, PACKED),
        1,
        ("--enable-prefix-caching",),
    ),
)

GPU = _scale(
    "gpu",
    "Real shapes with random weights in bfloat16 on one GPU, lengths cut so that all of it ends in minutes.",
    Case(
        "decode-heavy",
        "opt-125m",
        "decode:requests=512,prompt=48,output=1000",
        (STOCK, FRESH, SHARED, ROWS),
        2,
        _SEATS,
    ),
    Case("decode-short", "llama-3-8b", "decode:requests=256,prompt=48,output=300", (STOCK, ROWS), 2),
    Case("prefill-heavy", "opt-125m", "prefill:requests=512,prompt=1900,output=48", (FRESH, SHARED), 2),
    Case(
        "many prefixes",
        "gemma-3-4b",
        "rounds:prefixes=30,prefix=14000,suffix=64,output=16,rounds=2",
        (STOCK, PIN, OURS),
        2,
        ("--num-gpu-blocks-override", "64000", "--block-size", "16", "--max-model-len", "16384"),
    ),
    Case(
        "half the prefixes",
        "gemma-3-4b",
        "rounds:prefixes=15,prefix=14000,suffix=64,output=16,rounds=3",
        (STOCK, OURS),
        2,
        ("--num-gpu-blocks-override", "64000", "--block-size", "16", "--max-model-len", "16384"),
    ),
)

SCALES = {scale.name: scale for scale in (CPU, GPU)}
