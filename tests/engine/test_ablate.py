"""Ablation: variants flip one setting, verdicts follow from the intervals, an interrupted command resumes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvtune.analysis.comparison.ablation import (
    Ablation,
    figures,
    read,
    stored,
    worths,
)
from kvtune.analysis.run import RunAnalysis
from kvtune.cli import ablate as cli
from kvtune.core.settings import parse
from kvtune.engine import ablate as module
from kvtune.engine.ablate import JOURNAL, NAMED_ONLY, THRESHOLDS, folder_of, variants
from kvtune.engine.experiment import BASELINE
from kvtune.engine.profile import Profiled, ProfileJob
from kvtune.errors import KvtuneError, UsageError
from kvtune.fake_device.settings import constant
from kvtune.knobs import CORE, CoreSettings
from kvtune.report.console.summary import print_section
from kvtune.report.sections import ablation as shown
from kvtune.run.extras import AblationResult, AblationVariant, read_extras
from kvtune.run.file import read_run, write_run
from kvtune.run.types import Run
from kvtune.workload.spec import build
from tests.analysis.made import header_of, table

JOB = ProfileJob(model="tiny-opt", workload=build("decode:requests=2,prompt=8,output=8"))


def test_each_switch_and_the_thresholds_are_flipped_once() -> None:
    chosen = variants(JOB)
    switches = [n for n, k in CORE.items() if k.kind == "switch" and n not in NAMED_ONLY]
    assert [v.name for v in chosen] == [BASELINE, *switches, "thresholds"]
    for variant in chosen[1:-1]:
        assert variant.settings == {variant.name: not getattr(CoreSettings(), variant.name)}
        parse(variant.settings)
    assert parse(chosen[-1].settings).gc_threshold0 == THRESHOLDS[0]


def test_switches_of_few_models_are_flipped_only_when_named() -> None:
    (_, packed) = variants(JOB, ("packed",))
    assert packed.settings == {"packed": True} and packed.turned == "on"


def test_a_switch_that_the_job_has_off_is_turned_on() -> None:
    job = ProfileJob(model="m", workload=JOB.workload, core_settings={"rows": False, "gc_threshold0": 9000})
    result = {v.name: v for v in variants(job)}
    assert result["rows"].settings == {"rows": True} and result["rows"].turned == "on"
    assert result["thresholds"].settings["gc_threshold0"] == 0


def test_a_wrong_name_and_the_stock_core_are_refused() -> None:
    with pytest.raises(UsageError, match="rovs"):
        variants(JOB, ("rovs",))
    with pytest.raises(UsageError, match="--core stock"):
        variants(ProfileJob(model="m", workload=JOB.workload, core="stock"))


def run_of(pause_us: float, step_us: float) -> Run:
    steps = table(
        "steps", process=[1] * 4, t_s=[0, 1, 2, 3], step_us=[step_us] * 4, requests=[2] * 4,
        schedule_us=[10.0] * 4, update_us=[10.0] * 4,
    )  # fmt: skip
    gc = table("gc", process=[1, 1], t_s=[0.5, 1.5], generation=[0, 1], pause_us=[pause_us] * 2)
    return Run(header_of(), {"steps": steps, "gc": gc})


def test_verdicts() -> None:
    base = [figures(run_of(1000 + n, 5000 + 900 * n)) for n in range(3)]
    better = [figures(run_of(500 + n, 5100 + 900 * n)) for n in range(3)]
    result = {w.path: w for w in worths(base, better)}
    assert result["pause_ms"].verdict == "better" and result["pause_ms"].difference == pytest.approx(-1.0)
    assert result["step_ms"].verdict == "no difference shown"
    assert result["collections"].difference == 0 and result["collections"].verdict == "no difference shown"
    assert worths(base, better[:1])[0].verdict == "not judged"
    assert base[0]["rss_growth_bytes_s"] is None


def stored_result() -> AblationResult:
    base, other = ([figures(run_of(us + n, 5000)) for n in range(3)] for us in (1000, 500))
    sides = [
        AblationVariant(name=BASELINE, runs=base, files=["a", "b", "c"]),
        AblationVariant(
            name="freeze",
            turned="off",
            settings={"freeze": False},
            runs=other,
            files=["d", "e", "f"],
            failed=["died"],
        ),
    ]
    return AblationResult(planned=8, repeats=4, why="interrupted", sides=sides)


def result() -> Ablation:
    return read(stored_result())


def test_what_is_stored_is_read_again() -> None:
    ablation = result()
    assert (ablation.planned, ablation.done, ablation.repeats, ablation.why) == (8, 7, 4, "interrupted")
    assert ablation.baseline.files == ["a", "b", "c"] and ablation.baseline.worths == ()
    (side,) = ablation.turned
    assert (side.name, side.turned, side.settings, side.failed) == (
        "freeze",
        "off",
        {"freeze": False},
        ["died"],
    )
    assert {w.path: w.verdict for w in side.worths}["pause_ms"] == "better"


@pytest.mark.parametrize("damaged", [None, 7, {}, {"sides": []}, {"sides": [{"name": "x"}], "planned": 1}])
def test_a_damaged_or_missing_result_is_none(damaged: object) -> None:
    assert stored(Run(header_of(extra=read_extras({"ablation": damaged})))) is None


def test_the_table_has_verdicts_and_failures() -> None:
    out = io.StringIO()
    run = Run(header_of()).with_extra(ablation=stored_result())
    print_section(shown.section(RunAnalysis(run)), out)
    text = " ".join(out.getvalue().split())
    assert (
        "freeze off" in text
        and "better" in text
        and "=" in text
        and "7 of 8 runs were made: interrupted." in text
    )
    assert "A run failed. freeze: died" in text


class Engine:
    """Stands in for `profile`: a run file in no time, or what `codes` says: an exit code, or Ctrl-C."""

    def __init__(self, codes: Iterator[int | type[BaseException]]) -> None:
        self.codes, self.ran = codes, 0

    def __call__(self, job: ProfileJob, on_event: object) -> Profiled:
        code = next(self.codes, 0)
        if not isinstance(code, int):
            raise code
        self.ran += 1
        job.output.mkdir(exist_ok=True)
        path = job.output / f"{self.ran}.kvrun"
        run = run_of(1000 if job.core_settings.get("freeze", True) else 2000 + self.ran, 5000)
        write_run(run, path)
        return Profiled(run, path, KvtuneError("no", "", code) if code else None)


def job_in(folder: Path) -> ProfileJob:
    return replace(JOB, output=folder)


def with_engine(monkeypatch: pytest.MonkeyPatch, *codes: int | type[BaseException]) -> Engine:
    engine = Engine(iter(codes))
    monkeypatch.setattr(module, "profile", engine)
    return engine


def test_other_work_has_another_folder(tmp_path: Path) -> None:
    one = job_in(tmp_path)
    others = (replace(one, engine_args=("--max-num-seqs", "8")), replace(one, core_settings={"rows": False}))
    assert len({folder_of(each) for each in (one, *others)}) == 3
    on_host = replace(one, device=constant(0.0)), replace(one, device=constant(8000.0))
    assert len({folder_of(each) for each in (one, *on_host)}) == 3
    assert folder_of(one) == folder_of(job_in(tmp_path))


def test_stopped_at_once_it_promises_nothing_and_leaves_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_in(tmp_path)

    def reserved(inner: ProfileJob, on_event: object) -> Profiled:
        inner.output.mkdir()  # as `profile` does before its engine starts
        raise KvtuneError("interrupted", "", 130)

    monkeypatch.setattr(module, "profile", reserved)
    with pytest.raises(KvtuneError, match="interrupted") as raised:
        cli.run_ablation(job, "freeze", 2, 0.0, as_json=False)
    assert raised.value.exit_code == 130 and "starts from the beginning" in raised.value.hint
    assert "resumes" not in raised.value.hint
    assert not folder_of(job).exists()


def test_an_ablation_ends_at_once_if_its_baseline_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_engine(monkeypatch, 1)
    with pytest.raises(KvtuneError, match="no"):
        cli.run_ablation(job_in(tmp_path), "freeze", 2, 0.0, as_json=False)
    assert engine.ran == 1


def test_the_result_is_in_the_baselines_first_run_and_the_plan_is_printed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_engine(monkeypatch, 0, 0, 0, 130)
    job = job_in(tmp_path)
    assert cli.run_ablation(job, "freeze", 2, 0.0, as_json=False) == 130
    out, err = capsys.readouterr()
    assert "2 variants x 2 = 4 engine runs" in err and "plan: 4 engine runs of decode" in err
    assert "3 of 4 runs were made: interrupted." in " ".join(out.split()) and "to resume" in err
    with_engine(monkeypatch, 0)
    assert cli.run_ablation(job, "freeze", 2, 0.0, as_json=True) == 0
    out, err = capsys.readouterr()
    assert "3 of them done before" in err
    printed = json.loads(out)
    run = read_run(Path(printed["run_file"]))
    kept = stored(run)
    assert kept is not None and kept.why == "" and Path(printed["page"]).is_file()
    assert {w.path: w.verdict for w in kept.turned[0].worths}["pause_ms"] in ("worse", "not judged")
    assert kept.turned[0].worths[0].verdict == "no difference shown"  # as many collections, exactly
    assert not (folder_of(job) / JOURNAL).exists()  # the next one begins anew
