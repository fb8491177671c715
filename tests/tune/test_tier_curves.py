"""How much host memory is worth it: the curve of a study over sizes, on console, page and in `--json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtune.analysis.study import TierCurve, Trial
from kvtune.cli.app import run
from kvtune.report.console.tier_curve import knee_line
from kvtune.report.pages.study import study_page, study_sections
from kvtune.tune.objective import objective
from kvtune.tune.study import Study
from kvtune.tune.sweep import result
from kvtune.tune.tier_curves import tier_curves
from tests.golden import studies
from tests.report.drawn import words

GIB = 1 << 30
RATES = {0.0: 0.05, 1.0: 0.06, 2.0: 0.13, 4.0: 0.19, 8.0: 0.20, 16.0: 0.26}


def trial(number: int, gib: float, hits: float, **settings: Any) -> Trial:
    tier = {"tier_bytes": int(gib * GIB), "tier_hit_rate": hits - 0.05} if gib else None
    summary = {
        "prefix_cache": {"hit_rate": hits, "query_tokens": 10_000, "hit_tokens": round(10_000 * hits)},
        "ttft_ms": {"mean": 100 * (1 - hits)},
        "throughput_tok_s": 100.0,
        "offload": tier,
    }
    return Trial(number=number, settings={"kv_offloading_size": gib, **settings}, on="sim", summary=summary)


def swept() -> Study:
    """A size of none has no eviction policy: `grid.py` leaves it out there."""
    trials = [
        Trial(
            number=0, settings={}, on="sim", core="stock", role="baseline", summary=trial(0, 0, 0.05).summary
        )
    ]
    trials.append(trial(1, 0.0, RATES[0.0]))
    for policy, better in (("lru", 0.0), ("kvtune", 0.01)):
        for gib in (1.0, 2.0, 4.0, 8.0, 16.0):
            trials.append(trial(len(trials), gib, RATES[gib] + better, eviction_policy=policy))
    return Study("sweep", studies.bench(), tuple(trials))


def test_each_policy_has_a_curve_that_begins_without_host_memory() -> None:
    best, other = tier_curves(swept().trials, "sim")
    assert (best.settings, other.settings) == ({"eviction_policy": "kvtune"}, {"eviction_policy": "lru"})
    for curve in (best, other):
        assert [point.gib for point in curve.points] == [0, 1, 2, 4, 8, 16]
        assert curve.knee == 4
    last = other.points[-1]
    assert (last.computed_tokens, last.trial) == (7400, 6)
    assert last.tier_hit_rate == pytest.approx(0.21) and last.ttft_ms == pytest.approx(74)


def test_trials_that_differ_in_more_than_the_size_are_no_curve() -> None:
    mixed = [trial(1, 1.0, 0.1, slack=1), trial(2, 2.0, 0.2, slack=2), trial(3, 4.0, 0.3, slack=3)]
    assert tier_curves(mixed, "sim") == ()
    assert tier_curves([trial(1, 1.0, 0.1), trial(2, 2.0, 0.2)], "sim") == (), "two points do not bend"
    assert tier_curves(swept().trials, "engine") == ()
    stock = [t for t in swept().trials if t.settings.get("kv_offloading_size") != 0]
    assert [len(c.points) for c in tier_curves(stock, "sim")] == [5, 5], (
        "another core's run is not this one's"
    )


def test_the_knee_is_said_in_words() -> None:
    _, lru = tier_curves(swept().trials, "sim")
    assert knee_line(lru) == "knee at 4 GiB: 67 % of what 16 GiB gain over none"
    straight = TierCurve(lru.settings, lru.core, lru.points[:2] + lru.points[-1:], None)
    assert knee_line(straight).startswith("no knee from 0 to 16 GiB")


def test_the_page_draws_hits_tokens_and_first_tokens_over_gib_with_the_knee_marked() -> None:
    study = studies.viewed(swept())
    (section,) = [s for s in study_sections(study) if s.id == "host-memory"]
    assert [chart.title for chart in section.charts] == [
        "hit rate (%)",
        "computed prompt tokens",
        "first token (ms)",
    ]
    drawn = section.charts[0].data["tier-hits"]
    assert [g for g, knee in zip(drawn["gib"], drawn["knee"], strict=True) if knee] == [4, 4]
    assert "knee at 4 GiB" in section.lead
    assert "eviction_policy=lru: 5 at 0 GiB, 6 at 1 GiB, 13 at 2 GiB" in section.charts[0].label
    page = study_page(study)
    assert "How much host memory is worth it" in page
    assert "--block-size 32 --kv-offloading-size 16" in words(page), (
        "the next command, `kvtune tune`, has the best one's tier"
    )
    assert "host-memory" not in [s.id for s in study_sections(studies.viewed(studies.grid_study()))]


def test_the_console_has_a_table_a_curve_and_marks_the_knee(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "study.jsonl"
    journal.write_bytes(studies.journal(swept()))
    assert run(["report", str(journal), "--console"]) == 0
    text = capsys.readouterr().out
    assert "host memory, kvtune core, eviction_policy=kvtune" in text
    marked = [line.split() for line in text.splitlines() if line.endswith("knee")]
    assert [line[0] for line in marked] == ["4", "4"]
    assert "knee at 4 GiB: 67 % of what 16 GiB gain over none" in " ".join(text.split())


def test_the_json_has_the_curves() -> None:
    import msgspec

    content = json.loads(msgspec.json.encode(result(swept().trials, objective("hit-rate")).to_json()))
    curve = content["tier_curves"][0]
    assert curve["knee"] == 4.0 and curve["points"][0]["gib"] == 0.0
    assert curve["points"][3].keys() == {
        "gib",
        "hit_rate",
        "tier_hit_rate",
        "computed_tokens",
        "ttft_ms",
        "trial",
    }
