"""Packed blocks of tiny-granite on the real engine: answers are stock's, hits and block ids the simulator's.

Stock without prefix caching is what every other engine is compared with. The model is float32 all through, so the CPU's
rule for the type of states (KVTUNE_AVX512_BF16) changes nothing here.
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
    ROUNDS,
    ZIPF,
    Ran,
    answers_depend_on_the_first_block,
    cases,
    difference,
    replayed_step_by_step,
    started,
)

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(900)]

ON = [*FLAGS, *CHUNK, "--enable-prefix-caching"]
OFF = [*FLAGS, *CHUNK, "--no-enable-prefix-caching"]
TWO = {"cores": ["kvtune"], "core_settings": {"packed": True, "states_per_block": 2}}
GRANITE: dict[str, dict[str, Any]] = {
    "stock": {
        "cores": ["stock"],
        "args": OFF,
        "cases": [FIRST, *cases((ZIPF, 0), (DECODE, 0), (ROUNDS, 0), (CHAT, 0))],
    },
    "packed": {
        **PACKED,
        "args": ON,
        "cases": [FIRST, *cases((ZIPF, 40), (DECODE, 40), (ROUNDS, 0), (CHAT, 0))],
    },
    "uncached": {**PACKED, "args": OFF, "cases": cases((ZIPF, 36), (DECODE, 40), (ROUNDS, 0))},
    "two": {**TWO, "args": ON, "cases": cases((ZIPF, 22), (DECODE, 26))},
    "unit": {**PACKED, "args": [*ON, "--prefix-match-unit", "32"], "cases": cases((CHAT, 0), (ZIPF, 40))},
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return started(tmp_path_factory, "tiny-granite", GRANITE)


def test_answers_depend_on_the_first_block(ran: Ran) -> None:
    answers_depend_on_the_first_block(ran)


@pytest.mark.parametrize(
    ("layout", "work"),
    [(layout, c["workload"]) for layout, job in GRANITE.items() if layout != "stock" for c in job["cases"]],
)
def test_fp32_answers_are_stocks(ran: Ran, layout: str, work: str) -> None:
    stock, own = ran("stock")[work], ran(layout)[work]
    assert own["answers"] == stock["answers"]
    assert difference(own, stock) < 1e-4


def test_they_were_compared_under_hits_evictions_and_preemptions(ran: Ran) -> None:
    stock, packed = ran("stock"), ran("packed")
    assert packed["state"]["parts"]["packed"] is True
    assert (stock[ZIPF]["groups"], packed[ZIPF]["groups"], ran("two")[ZIPF]["groups"]) == (
        2,
        9,
        5,
    )
    assert (packed[ZIPF]["block"], ran("two")[ZIPF]["block"]) == (160, 320)
    for layout in ("packed", "two"):
        hits = ran(layout)[ZIPF]["hits"][0]
        assert 320 in hits and 0 in hits[4:]  # some of the later ones lost their prefix
        assert ran(layout)[ZIPF]["preemptions"] > 0
    assert packed[DECODE]["preemptions"] > 0
    assert packed[ROUNDS]["hits"][0] == [0, 1440, 1440]
    assert sum(ran("unit")[CHAT]["hits"][0]) > sum(packed[CHAT]["hits"][0]) > 0
    assert ran("uncached")[DECODE]["preemptions"]
    assert sum(ran("uncached")[ZIPF]["hits"][0]) == 0


@pytest.mark.parametrize("layout", GRANITE)
def test_the_simulator_replays_every_step(ran: Ran, layout: str) -> None:
    replayed_step_by_step(ran(layout))
