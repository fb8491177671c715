"""Ablation: variants flip one setting, verdicts follow from the intervals, an interrupted command resumes."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

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
from kvtune.engine.ablate import JOURNAL, NAMED_ONLY, THRESHOLDS, folder_of, variants
from kvtune.engine.experiment import BASELINE
from kvtune.engine.profile import EngineBench, Profiled
from kvtune.engine.setup import Load, Setup
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
from tests.labs import Answering

JOB = Setup(model="tiny-opt", load=Load.of(build("decode:requests=2,prompt=8,output=8")), core="kvtune")


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
    job = Setup(
        model="m",
        load=JOB.load,
        core_settings={"rows": False, "gc_threshold0": 9000},
        core="kvtune",
    )
    result = {v.name: v for v in variants(job)}
    assert result["rows"].settings == {"rows": True} and result["rows"].turned == "on"
    assert result["thresholds"].settings["gc_threshold0"] == 0


def test_a_wrong_name_and_the_stock_core_are_refused() -> None:
    with pytest.raises(UsageError, match="rovs"):
        variants(JOB, ("rovs",))
    with pytest.raises(UsageError, match="--core stock"):
        variants(Setup(model="m", load=JOB.load, core="stock"))


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

    def __call__(self, setup: Setup, output: Path) -> Profiled:
        code = next(self.codes, 0)
        if not isinstance(code, int):
            raise code
        self.ran += 1
        output.mkdir(exist_ok=True)
        path = output / f"{self.ran}.kvrun"
        run = run_of(1000 if setup.core_settings.get("freeze", True) else 2000 + self.ran, 5000)
        write_run(run, path)
        return Profiled(run, path, KvtuneError("no", "", code) if code else None)


def engine_that(*codes: int | type[BaseException]) -> Engine:
    return Engine(iter(codes))


def test_other_work_has_another_folder(tmp_path: Path) -> None:
    def of(**changes: object) -> Path:
        return folder_of(replace(JOB, **changes), EngineBench(tmp_path))

    assert len({of(), of(engine_args=["--max-num-seqs", "8"]), of(core_settings={"rows": False})}) == 3
    assert len({of(), of(device=constant(0.0)), of(device=constant(8000.0))}) == 3
    assert of() == of()


def test_stopped_at_once_it_promises_nothing_and_leaves_no_empty_folder(tmp_path: Path) -> None:
    def reserved(setup: Setup, output: Path) -> Profiled:
        output.mkdir()  # as a bench does before its engine starts
        raise KvtuneError("interrupted", "", 130)

    bench = Answering(tmp_path, answer=reserved)
    with pytest.raises(KvtuneError, match="interrupted") as raised:
        cli.run_ablation(JOB, bench, "freeze", 2, 0.0, as_json=False)
    assert raised.value.exit_code == 130 and "starts from the beginning" in raised.value.hint
    assert "resumes" not in raised.value.hint
    assert not folder_of(JOB, bench).exists()


def test_an_ablation_ends_at_once_if_its_baseline_fails(tmp_path: Path) -> None:
    engine = engine_that(1)
    with pytest.raises(KvtuneError, match="no"):
        cli.run_ablation(JOB, Answering(tmp_path, answer=engine), "freeze", 2, 0.0, as_json=False)
    assert engine.ran == 1


def test_the_result_is_in_the_baselines_first_run_and_the_plan_is_printed_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Answering(tmp_path, answer=engine_that(0, 0, 0, 130))
    assert cli.run_ablation(JOB, bench, "freeze", 2, 0.0, as_json=False) == 130
    out, err = capsys.readouterr()
    assert "2 variants x 2 = 4 engine runs" in err and "plan: 4 engine runs of decode" in err
    assert "3 of 4 runs were made: interrupted." in " ".join(out.split()) and "to resume" in err
    bench = Answering(tmp_path, answer=engine_that(0))
    assert cli.run_ablation(JOB, bench, "freeze", 2, 0.0, as_json=True) == 0
    out, err = capsys.readouterr()
    assert "3 of them done before" in err
    printed = json.loads(out)
    run = read_run(Path(printed["run_file"]))
    kept = stored(run)
    assert kept is not None and kept.why == "" and Path(printed["page"]).is_file()
    assert {w.path: w.verdict for w in kept.turned[0].worths}["pause_ms"] in ("worse", "not judged")
    assert kept.turned[0].worths[0].verdict == "no difference shown"  # as many collections, exactly
    assert not (folder_of(JOB, bench) / JOURNAL).exists()  # the next one begins anew
