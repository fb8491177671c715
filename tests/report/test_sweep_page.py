"""The sweep's page: from the `--json` object to one file."""

from __future__ import annotations

from typing import Any

from kvtune.report.sweep_page import sweep_page, sweep_sections


def trial(number: int, state: str = "complete", **settings: Any) -> dict[str, Any]:
    return {
        "number": number,
        "settings": settings,
        "on": "sim",
        "core": "kvtune",
        "state": state,
        "why": "" if state == "complete" else "<b>refused</b>",
        "model": "tiny-gemma3",
        "workload": {"spec": "rounds"},
        "prefix_cache": {"hit_rate": number / 10},
        "ttft_ms": {"mean": 100.0 - number},
        "throughput_tok_s": 5.0 + number,
    }


def found() -> dict[str, Any]:
    trials = [
        trial(i, pin_window=pin, min_drop=drop, block_size=block)
        for i, (pin, drop, block) in enumerate(
            (p, d, b) for p in (0, 1024) for d in (1, 16) for b in (32, 64)
        )
    ]
    trials.append(trial(8, "failed", pin_window=5, min_drop=1, block_size=32))
    verdict = {"text": "hit-rate 0.7 against stock's 0"}
    return {
        "objective": "hit-rate",
        "trials": trials,
        "best": trials[7],
        "baseline": trials[0],
        "verdict": verdict,
    }


EFFECTS = [
    ("pin_window", [(0, 0.15, 4), (1024, 0.55, 4)]),
    ("min_drop", [(1, 0.25, 4), (16, 0.45, 4)]),
    ("block_size", [(32, 0.3, 4), (64, 0.4, 4)]),
]


def test_a_heat_map_for_each_block_size() -> None:
    sections = {s.id: s for s in sweep_sections(found(), EFFECTS)}
    maps = sections["maps"].charts
    assert [c.title for c in maps] == [f"block_size {b}: pin_window and min_drop" for b in (32, 64)]
    assert len(sections["maps"].data[maps[0].id]["figure"]) == 4
    assert "70" in maps[1].label
    assert [c.title for c in sections["effects"].charts] == ["pin_window", "min_drop", "block_size"]


def test_the_page_escapes_and_holds_every_trial() -> None:
    html = sweep_page(found(), EFFECTS)
    assert "<b>refused" not in html
    assert "&lt;b&gt;refused" in html
    assert "Simulated." in html
    assert html.count("pin_window") > 3


def test_one_trial_of_the_defaults_has_a_page() -> None:
    one = {**found(), "trials": [trial(0)], "best": trial(0), "baseline": None}
    assert "defaults" in sweep_page(one, [])
