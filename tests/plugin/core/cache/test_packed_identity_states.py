"""Packed blocks of tiny-qwen3next (bfloat16) on the real engine, with states of the model's type and with float32's.

A CPU with AVX-512 BF16 keeps them in float32 (base/cpu.py); both answers are tried, whichever CPU this is.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.plugin.core.cache import identity_rig as rig

pytestmark = rig.MARKS

LAYOUTS = ("stock", "packed", "control", "fine")
CASES = [rig.FIRST, *rig.cases((rig.ZIPF, 0), (rig.DECODE, 0), (rig.CHAT, 0))]
BLOCKS = {False: (256, 160), True: (384, 288)}
"""Of stock's layout and packed, by whether states are float32."""


def jobs(packed_block: int) -> dict[str, dict[str, Any]]:
    """`control` and `fine`: prompts cut as packed blocks cut them, by stock without caching and by packed blocks."""
    fine = [*rig.FLAGS, "--max-num-batched-tokens", str(packed_block)]
    return {
        "stock": {"cores": ["stock"], "args": [*rig.FLAGS, *rig.CHUNK], "cases": CASES},
        "packed": {**rig.PACKED, "args": [*rig.FLAGS, *rig.CHUNK], "cases": CASES},
        "control": {"cores": ["stock"], "args": [*fine, "--no-enable-prefix-caching"], "cases": CASES},
        "fine": {**rig.PACKED, "args": fine, "cases": CASES},
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, avx512_bf16: bool) -> rig.Ran:
    return rig.started(tmp_path_factory, "tiny-qwen3next", jobs(BLOCKS[avx512_bf16][1]))


def test_answers_depend_on_the_first_block(ran: rig.Ran) -> None:
    rig.answers_depend_on_the_first_block(ran)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_simulator_replays_every_step(ran: rig.Ran, layout: str) -> None:
    rig.replayed_step_by_step(ran(layout))


def test_bf16_differs_from_stock_no_more_than_stock_from_itself(ran: rig.Ran, avx512_bf16: bool) -> None:
    """Where prompts are cut decides how bf16 rounds: the kernel works on 64 tokens at once, a packed block has others.

    Requests one after another are cut as the chunk says: cut alike, packed blocks answer as stock does. Cut otherwise,
    stock differs from itself by more than packed blocks ever do from it.
    """
    stock, packed, control, fine = map(ran, LAYOUTS)
    assert packed["state"]["parts"]["packed"] and fine["state"]["parts"]["packed"]
    assert (stock[rig.ZIPF]["block"], packed[rig.ZIPF]["block"]) == BLOCKS[avx512_bf16]
    # Stock and packed cut a prompt at its last whole block: alike for the kernel where both blocks are whole 64s
    # (256 and 320 of 400 tokens; with float32 states 384 and 288, which is not).
    alike = [(fine, control)] if avx512_bf16 else [(packed, stock), (fine, control)]
    for one, other in alike:
        assert one["first"]["answers"] == other["first"]["answers"]
        assert rig.difference(one["first"], other["first"]) < 1e-3
    works = ("first", rig.ZIPF, rig.DECODE, rig.CHAT)
    rounding = max(rig.difference(control[work], stock[work]) for work in works)
    assert rounding > 0.01
    assert max(rig.difference(packed[work], stock[work]) for work in works) <= rounding
    assert max(rig.difference(fine[work], control[work]) for work in works) <= rounding
    assert sum(packed[rig.ZIPF]["hits"][0]) > 0 and sum(control[rig.ZIPF]["hits"][0]) == 0
