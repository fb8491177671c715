"""Packed blocks of tiny-granite on the real engine: answers are stock's, hits and block ids the simulator's.

Stock without prefix caching is what every other engine is compared with. The model is float32 all through, so the CPU's
rule for the type of states (KVTUNE_AVX512_BF16) changes nothing here.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.plugin.core.cache import identity_rig as rig

pytestmark = rig.MARKS

ON = [*rig.FLAGS, *rig.CHUNK, "--enable-prefix-caching"]
OFF = [*rig.FLAGS, *rig.CHUNK, "--no-enable-prefix-caching"]
TWO = {"cores": ["kvtune"], "core_settings": {"packed": True, "states_per_block": 2}}
GRANITE: dict[str, dict[str, Any]] = {
    "stock": {
        "cores": ["stock"],
        "args": OFF,
        "cases": [rig.FIRST, *rig.cases((rig.ZIPF, 0), (rig.DECODE, 0), (rig.ROUNDS, 0), (rig.CHAT, 0))],
    },
    "packed": {
        **rig.PACKED,
        "args": ON,
        "cases": [rig.FIRST, *rig.cases((rig.ZIPF, 40), (rig.DECODE, 40), (rig.ROUNDS, 0), (rig.CHAT, 0))],
    },
    "uncached": {
        **rig.PACKED,
        "args": OFF,
        "cases": rig.cases((rig.ZIPF, 36), (rig.DECODE, 40), (rig.ROUNDS, 0)),
    },
    "two": {**TWO, "args": ON, "cases": rig.cases((rig.ZIPF, 22), (rig.DECODE, 26))},
    "unit": {
        **rig.PACKED,
        "args": [*ON, "--prefix-match-unit", "32"],
        "cases": rig.cases((rig.CHAT, 0), (rig.ZIPF, 40)),
    },
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> rig.Ran:
    return rig.started(tmp_path_factory, "tiny-granite", GRANITE)


def test_answers_depend_on_the_first_block(ran: rig.Ran) -> None:
    rig.answers_depend_on_the_first_block(ran)


@pytest.mark.parametrize(
    ("layout", "work"),
    [(layout, c["workload"]) for layout, job in GRANITE.items() if layout != "stock" for c in job["cases"]],
)
def test_fp32_answers_are_stocks(ran: rig.Ran, layout: str, work: str) -> None:
    stock, answered = ran("stock")[work], ran(layout)[work]
    assert answered["answers"] == stock["answers"]
    assert rig.difference(answered, stock) < 1e-4


def test_they_were_compared_under_hits_evictions_and_preemptions(ran: rig.Ran) -> None:
    stock, packed = ran("stock"), ran("packed")
    assert packed["state"]["parts"]["packed"] is True
    assert (stock[rig.ZIPF]["groups"], packed[rig.ZIPF]["groups"], ran("two")[rig.ZIPF]["groups"]) == (
        2,
        9,
        5,
    )
    assert (packed[rig.ZIPF]["block"], ran("two")[rig.ZIPF]["block"]) == (160, 320)
    for layout in ("packed", "two"):
        hits = ran(layout)[rig.ZIPF]["hits"][0]
        assert 320 in hits and 0 in hits[4:]  # some of the later ones lost their prefix
        assert ran(layout)[rig.ZIPF]["preemptions"] > 0
    assert packed[rig.DECODE]["preemptions"] > 0
    assert packed[rig.ROUNDS]["hits"][0] == [0, 1440, 1440]
    assert sum(ran("unit")[rig.CHAT]["hits"][0]) > sum(packed[rig.CHAT]["hits"][0]) > 0
    assert ran("uncached")[rig.DECODE]["preemptions"]
    assert sum(ran("uncached")[rig.ZIPF]["hits"][0]) == 0


@pytest.mark.parametrize("layout", GRANITE)
def test_the_simulator_replays_every_step(ran: rig.Ran, layout: str) -> None:
    rig.replayed_step_by_step(ran(layout))
