"""The ways to a hit, by arithmetic: what a primer shares with its prompt, wherever blocks, windows and prompts end."""

from __future__ import annotations

from itertools import takewhile
from random import Random

import pytest

from kvtune.answers.check.paths import CHUNK, COLD, FILLED, PATHS, Layout, length, way, why_not

LAYOUTS = (
    Layout(blocks=[16]),
    Layout(blocks=[32], window=512),
    Layout(blocks=[32, 384], longest=8192),
    Layout(blocks=[128], window=64, longest=1024),
    Layout(blocks=[16, 1600]),
    Layout(blocks=[8320], longest=4096),
    Layout(blocks=[384], longest=2048),
)


def shared(prompt: list[int], primer: list[int]) -> int:
    pairs = zip(prompt, primer, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_primer_shares_what_its_way_says(layout: Layout) -> None:
    draw = Random(3)
    prompts = [[draw.randrange(10, 13) for _ in range(length(layout, number))] for number in range(12)]
    inside = set()
    for number, prompt in enumerate(prompts):
        assert not layout.longest or len(prompt) < layout.longest - 100
        for name in PATHS.keys() - COLD - {"kept"}:
            if why_not(name, layout, [""], fill=True) and name not in FILLED:
                continue
            found = way(name, layout, prompts, number, 16)
            most = found.hits[-1]
            assert 0 < found.hits[0] <= most and found.primers
            for primer in (*found.primers, *found.later):
                assert not layout.longest or len(primer) < layout.longest
                if name == "long":
                    assert primer == found.ids and len(primer) > CHUNK + layout.blocks[-1] // 2
                    continue
                assert primer == prompt or 0 < shared(prompt, primer) <= most
            if name in ("inside", "junction") and len(prompt) > 3 * layout.blocks[-1]:
                ends = {shared(prompt, primer) for primer in found.primers}
                assert ends == {most}
                inside.add(most % layout.blocks[-1])
            if name == "junction" and len(prompt) > 3 * layout.blocks[-1]:
                one, two = found.primers
                assert len(two) > len(one) > most and one[:most] == two[:most]
        swapped = way("exchanged", layout, prompts, number, 16).ids
        assert len(swapped) >= len(prompt) - layout.blocks[0] and swapped != prompt
    assert 0 not in inside and (len(inside) >= 3 or layout.blocks[-1] > 4096)
