"""Ablation: variants turn one thing over, the order is fair, the table's verdicts follow from the intervals."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest

from kvtune.analysis.ablation import ablation, figures
from kvtune.core.settings import KNOBS, LEGACY, CoreSettings, parse
from kvtune.engine import ablate as module
from kvtune.engine.ablate import BASELINE, THRESHOLDS, Variant, ablate, order, variants
from kvtune.engine.profile import Job, Profiled
from kvtune.errors import KvtuneError, UsageError
from kvtune.report.ablation_text import print_ablation
from kvtune.run.types import Run
from kvtune.workload.spec import build
from tests.analysis.made import header_of, table

JOB = Job(model="tiny-opt", workload=build("decode:requests=2,prompt=8,output=8"))


def test_each_switch_is_turned_over_once_and_the_thresholds_too() -> None:
    found = variants(JOB)
    switches = [n for n, knob in KNOBS.items() if knob.kind == "switch" and not n.startswith(LEGACY)]
    assert [v.name for v in found] == [BASELINE, *switches, "thresholds"]
    for variant in found[1:-1]:
        assert variant.settings == {variant.name: not getattr(CoreSettings(), variant.name)}
        parse(variant.settings)
    assert parse(found[-1].settings).gc_threshold0 == THRESHOLDS[0]


def test_what_vllm_once_did_is_brought_back_only_when_named() -> None:
    (_, brought_back) = variants(JOB, ("legacy_free_list",))
    assert brought_back.settings == {"legacy_free_list": True} and brought_back.turned == "on"


def test_what_the_job_has_off_is_turned_on() -> None:
    job = Job(model="m", workload=JOB.workload, core_settings={"rows": False, "gc_threshold0": 9000})
    found = {v.name: v for v in variants(job)}
    assert found["rows"].settings == {"rows": True} and found["rows"].turned == "on"
    assert found["thresholds"].settings["gc_threshold0"] == 0


def test_a_wrong_name_and_the_stock_core_are_refused() -> None:
    with pytest.raises(UsageError, match="rovs"):
        variants(JOB, ("rovs",))
    with pytest.raises(UsageError, match="--core stock"):
        variants(Job(model="m", workload=JOB.workload, core="stock"))


@pytest.mark.parametrize(("count", "repeats"), [(1, 1), (3, 4), (10, 3)])
def test_the_order_is_interleaved(count: int, repeats: int) -> None:
    found = list(order(count, repeats))
    assert Counter(variant for _, variant in found) == dict.fromkeys(range(count), repeats)
    assert [repeat for repeat, _ in found] == sorted(repeat for repeat, _ in found)
    if repeats >= 3 and count > 1:
        assert len({tuple(v for r, v in found if r == n) for n in range(repeats)}) > 1


def run_of(pause_us: float, step_us: float) -> Run:
    steps = table(
        "steps", process=[1] * 4, t_s=[0, 1, 2, 3], step_us=[step_us] * 4, requests=[2] * 4,
        schedule_us=[10.0] * 4, update_us=[10.0] * 4,
    )  # fmt: skip
    gc = table("gc", process=[1, 1], t_s=[0.5, 1.5], generation=[0, 1], pause_us=[pause_us] * 2)
    return Run(header_of(), {"steps": steps, "gc": gc})


def test_verdicts() -> None:
    base = [run_of(1000 + n, 5000 + 900 * n) for n in range(3)]
    better = [run_of(500 + n, 5100 + 900 * n) for n in range(3)]
    found = {w.figure: w for w in ablation(base, {"x": better})["x"]}
    assert found["pause_ms"].verdict == "better" and found["pause_ms"].difference == pytest.approx(-1.0)
    assert found["step_ms"].verdict == "no difference shown"
    assert found["collections"].difference == 0 and found["collections"].verdict == "no difference shown"
    assert ablation(base, {"x": better[:1]})["x"][0].verdict == "too few runs"
    assert figures(base[0])["rss_growth_bytes_s"] is None


def test_the_table_says_so() -> None:
    base, other = [run_of(1000 + n, 5000) for n in range(3)], [run_of(500 + n, 5000) for n in range(3)]
    out = io.StringIO()
    print_ablation(ablation(base, {"freeze": other}), {"freeze": "off"}, 3, out)
    assert "freeze off" in out.getvalue() and "better" in out.getvalue() and "=" in out.getvalue()


def test_a_failed_run_is_left_out_and_an_interrupted_one_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = iter([0, 1, 0, 130, 0])

    def profiled(job: Job, on_event: object) -> Profiled:
        code = next(codes)
        return Profiled(run_of(1, 1), Path("x"), KvtuneError("no", "", code) if code else None)

    monkeypatch.setattr(module, "profile", profiled)
    chosen = (Variant(BASELINE, {}, ""), Variant("freeze", {"freeze": False}, "off"))
    found = ablate(JOB, chosen, 3, lambda name, number, total: lambda event: None)
    assert sum(map(len, found.values())) == 2
