"""`kvtune report`, `compare` and `export` on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtune.data.run.file import write_run
from kvtune.data.run.types import CoreInfo
from tests.golden.synthetic import open_run, rounds_run
from tests.simulator import run as kvtune


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    write_run(rounds_run(prefixes=8), made / "stock.kvrun")
    core = CoreInfo(name="kvtune", active=True)
    write_run(rounds_run(prefixes=8, hit_share=(0.0, 0.98, 0.98), core=core), made / "kvtune.kvrun")
    write_run(open_run(requests=12, output=10), made / "other.kvrun")
    return made


def test_one_run_becomes_its_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert kvtune(["report", str(folder / "stock.kvrun"), "-o", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    html = page.read_text()
    assert "What to change" in html
    assert "seen before, not in the cache" in html, "the workload was made again"


def test_two_runs_become_a_comparison(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    runs = [str(folder / "stock.kvrun"), str(folder / "kvtune.kvrun")]
    assert kvtune(["report", *runs, "-o", str(page)]) == 0
    assert "kvtune against stock" in page.read_text()


def test_a_page_is_not_overwritten_without_force(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    call = ["report", str(folder / "stock.kvrun"), "-o", str(page)]
    assert kvtune(call) == 2
    said = capsys.readouterr().err
    assert str(page) in said and "--force" in said
    assert page.read_text() == "mine"
    assert kvtune([*call, "--force"]) == 0
    assert page.read_text() != "mine"


def test_the_console_view_writes_no_page(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(folder.iterdir())
    assert kvtune(["report", str(folder / "stock.kvrun"), "--console"]) == 0
    assert "Prefix cache" in capsys.readouterr().out
    runs = [str(folder / "stock.kvrun"), str(folder / "kvtune.kvrun")]
    assert kvtune(["report", *runs, "--console"]) == 0
    assert "kvtune against stock" in capsys.readouterr().out
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("condition", "code"),
    [("ttft_ms.mean < -10%", 1), ("ttft_ms.mean > +5%", 0), ("prefix_cache.hit_rate > 0.5", 1)],
)
def test_compare_exits_1_when_the_condition_holds(
    folder: Path, condition: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(folder / "stock.kvrun"), str(folder / "kvtune.kvrun")]
    assert kvtune(["compare", *runs, "--fail-on", condition, "--anyway"]) == code
    captured = capsys.readouterr()
    assert ("--fail-on holds" in captured.err) is bool(code)
    assert "prefix cache hit rate" in captured.out


def test_fail_on_times_of_one_run_a_side_is_refused_with_the_line_to_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(folder / "stock.kvrun"), str(folder / "kvtune.kvrun")]
    condition = "prefix_cache.hit_rate > 0.9 or ttft_ms.mean > +5%"
    assert kvtune(["compare", *runs, "--fail-on", condition]) == 3
    said = capsys.readouterr()
    assert "'ttft_ms.mean > +5%' is about times, and times of one run a side are not judged" in said.err
    assert (
        "run the sides in turns: for run in 1 2 3; do kvtune profile" in said.err
        and "--anyway" in said.err
        and not said.out
    )
    assert kvtune(["compare", *runs, "--fail-on", "gc.engine_core.collections_total > +50000%"]) == 0
    assert kvtune(["compare", *runs, *runs, "--fail-on", "ttft_ms.mean > +500%"]) == 0


def test_compare_prints_one_json_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(folder / f"{name}.kvrun") for name in ("stock", "kvtune", "stock")]
    assert kvtune(["compare", *runs, "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in parsed["runs"]] == ["stock (1)", "kvtune (2)", "stock (3)"]
    assert [c["name"] for c in parsed["comparisons"]] == ["kvtune (2)", "stock (3)"]
    figures = {f["path"]: f for f in parsed["comparisons"][0]["figures"]}
    assert figures["prefix_cache.hit_rate"]["verdict"] == "better"
    assert figures["ttft_ms.mean"]["verdict"] == "not judged" and figures["ttft_ms.mean"]["high"] is None
    assert parsed["comparable"] is True and parsed["failed"] == []


def test_compare_prints_markdown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(folder / "stock.kvrun"), str(folder / "kvtune.kvrun")]
    assert kvtune(["compare", *runs, "--md"]) == 0
    figures, _, _ = capsys.readouterr().out.partition("## Settings")
    lines = [line for line in figures.splitlines() if line.startswith("|")]
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1, "all rows have as many cells"
    assert any(line.startswith("| prefix cache hit rate |") and line.endswith("| better |") for line in lines)


def test_incomparable_runs_are_refused_by_field_without_anyway(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [str(folder / "stock.kvrun"), str(folder / "other.kvrun")]
    assert kvtune(["compare", *runs]) == 2
    said = capsys.readouterr().err
    assert "workload" in said and "--anyway" in said
    assert kvtune(["compare", *runs, "--anyway"]) == 0
    assert "workload differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (["compare", "{stock}"], "at least two"),
        (["compare", "{stock}", "{kvtune}", "--json", "--md"], "--md is not read with --json"),
        (["compare", "{stock}", "{kvtune}", "--fail-on", "nonsense"], "is not a condition"),
        (["compare", "{stock}", "{kvtune}", "--fail-on", "ttft.mean > 1"], "no field 'ttft.mean'"),
        (["compare", "{stock}", "gone.kvrun"], "no run file gone.kvrun"),
        (["export", "{stock}"], "exactly one format"),
        (["export", "{stock}", "--csv", "--perfetto"], "exactly one format"),
        (["report", "gone.kvrun"], "no run file gone.kvrun"),
    ],
)
def test_bad_input_is_one_line_what_and_one_line_what_next(
    folder: Path, call: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {name: str(folder / f"{name}.kvrun") for name in ("stock", "kvtune")}
    assert kvtune([word.format(**names) for word in call]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert len(lines) == 2 and said in lines[0] and lines[1].startswith("  next: ")


@pytest.mark.parametrize(("flag", "suffix"), [("--perfetto", ".trace.json")])
def test_exports_write_beside_the_run_file(flag: str, suffix: str, tmp_path: Path) -> None:
    write_run(rounds_run(prefixes=3, rounds=1), tmp_path / "a.kvrun")
    assert kvtune(["export", str(tmp_path / "a.kvrun"), flag]) == 0
    json.loads((tmp_path / f"a{suffix}").read_text())
    assert kvtune(["export", str(tmp_path / "a.kvrun"), flag]) == 2, "nothing is overwritten"
    assert kvtune(["export", str(tmp_path / "a.kvrun"), flag, "--force"]) == 0
