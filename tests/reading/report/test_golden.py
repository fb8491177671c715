"""Every golden run file, of every schema version, through every view."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvtune.data.run.file import read_run
from kvtune.data.run.types import SCHEMA
from kvtune.data.show.markdown import markdown
from kvtune.data.show.page import document_page
from kvtune.reading.analysis.rebuild import workload_of
from kvtune.reading.analysis.run import RunAnalysis
from kvtune.reading.analysis.summary import summary
from kvtune.reading.report.comparison import compared, document
from kvtune.reading.report.contrast import contrast
from kvtune.reading.report.export.csv import write_csv
from kvtune.reading.report.export.trace import chrome_trace
from kvtune.reading.report.sections import run_sections
from tests.golden.make import FOLDER, RUNS
from tests.reading.report.drawn import run_page, summary_text, words

FILES = sorted(FOLDER.glob("*.kvrun"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_there_is_a_golden_file_of_every_schema_and_kind() -> None:
    names = {path.stem for path in FILES}
    assert names >= {f"schema{SCHEMA}-{kind}" for kind in RUNS}
    assert {name.split("-")[0] for name in names} >= {f"schema{version}" for version in range(1, SCHEMA + 1)}


def test_every_view_draws_a_golden_run(golden: Path, tmp_path: Path) -> None:
    run = read_run(golden)
    workload = workload_of(run)
    html = run_page(RunAnalysis(run, workload))
    assert html.startswith("<!doctype html>") and html.rstrip().endswith("</html>")
    fields = summary(RunAnalysis(run, workload))
    json.dumps(fields, allow_nan=False)
    assert run.header.model in summary_text(RunAnalysis(run, workload), width=400)
    json.dumps(chrome_trace(run), allow_nan=False)
    assert write_csv(run, tmp_path / "csv")


def test_a_golden_run_compares_with_itself(golden: Path) -> None:
    run = read_run(golden)
    made = contrast([run, run], ["one", "two"])
    assert not made.differences
    shown = document(made)
    assert "no difference shown in any figure" in words(document_page(shown))
    assert markdown(shown)
    json.dumps(msgspec.to_builtins(compared(made, [])), allow_nan=False)


@pytest.mark.parametrize("kind", RUNS)
def test_the_current_schemas_files_are_what_the_generator_makes(kind: str) -> None:
    read, made = read_run(FOLDER / f"schema{SCHEMA}-{kind}.kvrun"), RUNS[kind]()
    assert read.header == made.header
    assert read.tables.keys() == made.tables.keys()
    for name, table in made.tables.items():
        for column, values in table.items():
            np.testing.assert_array_equal(read.tables[name][column], values, err_msg=f"{name}.{column}")


def test_causes_of_misses_come_from_the_workload_made_again() -> None:
    run = read_run(FOLDER / "schema1-rounds.kvrun")
    causes = summary(RunAnalysis(run, workload_of(run)))["prefix_cache"]["misses"]
    assert causes["not_cached"] > 0 and causes["cold"] > 0
    assert (
        sum(causes.values()) + run.tables["requests"]["hit_tokens"].sum()
        == run.tables["requests"]["prompt_tokens"].sum()
    )
    assert "seen before, not in the cache" in run_page(RunAnalysis(run, workload_of(run)))


def test_a_real_engines_run_has_evictions_and_a_flame_graph_on_its_page() -> None:
    """Recorded with `--stacks` on a pool of 700 blocks, which is too small for its load."""
    run = read_run(FOLDER / "schema1-real.kvrun")
    result = {s.id: s for s in run_sections(RunAnalysis(run, workload_of(run)))}
    timeline = result["timeline"].data
    assert sum(timeline["evicted"]["blocks"]) == run.tables["pool"]["evicted"].sum() == 4070
    assert set(timeline["evicted"]["queue"]) <= set(run.header.engine.settings["tiers"])
    flames = [c for c in result["stacks"].charts if c.title.endswith("flame graph")]
    assert [c.title for c in flames] == ["EngineCore: flame graph", "worker: flame graph"]
    functions = result["stacks"].data[flames[0].id]["function"]
    assert "EngineCoreProc.run_busy_loop" in functions and "EngineCore.step" in functions
    for chart in flames:
        data = result["stacks"].data[chart.id]
        assert min(data["start"]) >= 0 and max(data["end"]) <= 100.01
