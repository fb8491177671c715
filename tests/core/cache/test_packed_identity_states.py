"""Packed blocks of tiny-qwen3next (bfloat16) on the real engine, with states of the model's type and with float32's.

A CPU with AVX-512 BF16 keeps them in float32 (run/cpu.py); both answers are tried, whichever CPU this is.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.cache.identity_rig import (
    CHAT,
    CHUNK,
    DECODE,
    FIRST,
    FLAGS,
    PACKED,
    ZIPF,
    Ran,
    answers_depend_on_the_first_block,
    cases,
    difference,
    replayed_step_by_step,
    started,
)

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

LAYOUTS = ("stock", "packed", "control", "fine")
CASES = [FIRST, *cases((ZIPF, 0), (DECODE, 0), (CHAT, 0))]
BLOCKS = {False: (256, 160), True: (384, 288)}
"""Of stock's layout and packed, by whether states are float32."""


def jobs(packed_block: int) -> dict[str, dict[str, Any]]:
    """`control` and `fine`: prompts cut as packed blocks cut them, by stock without caching and by packed blocks."""
    fine = [*FLAGS, "--max-num-batched-tokens", str(packed_block)]
    return {
        "stock": {"cores": ["stock"], "args": [*FLAGS, *CHUNK], "cases": CASES},
        "packed": {**PACKED, "args": [*FLAGS, *CHUNK], "cases": CASES},
        "control": {"cores": ["stock"], "args": [*fine, "--no-enable-prefix-caching"], "cases": CASES},
        "fine": {**PACKED, "args": fine, "cases": CASES},
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, avx512_bf16: bool) -> Ran:
    return started(tmp_path_factory, "tiny-qwen3next", jobs(BLOCKS[avx512_bf16][1]))


def test_answers_depend_on_the_first_block(ran: Ran) -> None:
    answers_depend_on_the_first_block(ran)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_simulator_replays_every_step(ran: Ran, layout: str) -> None:
    replayed_step_by_step(ran(layout))


def test_bf16_differs_from_stock_no_more_than_stock_from_itself(ran: Ran, avx512_bf16: bool) -> None:
    """Where prompts are cut decides how bf16 rounds: the kernel works on 64 tokens at once, a packed block has others.

    Requests one after another are cut as the chunk says: cut alike, packed blocks answer as stock does. Cut otherwise,
    stock differs from itself by more than packed blocks ever do from it.
    """
    stock, packed, control, fine = map(ran, LAYOUTS)
    assert packed["state"]["parts"]["packed"] and fine["state"]["parts"]["packed"]
    assert (stock[ZIPF]["block"], packed[ZIPF]["block"]) == BLOCKS[avx512_bf16]
    # Stock and packed cut a prompt at its last whole block: alike for the kernel where both blocks are whole 64s
    # (256 and 320 of 400 tokens; with float32 states 384 and 288, which is not).
    alike = [(fine, control)] if avx512_bf16 else [(packed, stock), (fine, control)]
    for one, other in alike:
        assert one["first"]["answers"] == other["first"]["answers"]
        assert difference(one["first"], other["first"]) < 1e-3
    works = ("first", ZIPF, DECODE, CHAT)
    rounding = max(difference(control[work], stock[work]) for work in works)
    assert rounding > 0.01
    assert max(difference(packed[work], stock[work]) for work in works) <= rounding
    assert max(difference(fine[work], control[work]) for work in works) <= rounding
    assert sum(packed[ZIPF]["hits"][0]) > 0 and sum(control[ZIPF]["hits"][0]) == 0
