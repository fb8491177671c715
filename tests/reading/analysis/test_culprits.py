"""Culprits: counts of sampled collections scaled to steps, by process; incomplete probe data is tolerated."""

from __future__ import annotations

from typing import Any

import pytest

from kvtune.data.run.extras import read_extras
from kvtune.data.run.types import Run
from kvtune.reading.analysis.culprits import culprits
from kvtune.reading.analysis.run import RunAnalysis
from tests.golden.synthetic import HOSTILE, replace_header, rounds_run
from tests.reading.report.drawn import run_page


def row(type: str, count: int, file: str = "", line: int = 0) -> dict[str, Any]:
    return {"type": type, "file": file, "line": line, "count": count, "bytes": count * 56}


@pytest.fixture(scope="module")
def probed() -> Run:
    site = "/opt/venv/lib/python3.11/site-packages/vllm/distributed/shm_broadcast.py"
    rows = [
        row("list", 900, site, 984),
        row("tuple", 90, "/opt/venv/lib/python3.11/pickle.py", 3),
        row(HOSTILE, 10),
    ]
    sites = {"steps": 500, "processes": {"1": {"collections": 80, "samples": 4, "rows": rows}}}
    ledger = {"1": {"triggers": [{"file": site, "line": 984, "collections": 70}]}, "0": {"triggers": []}}
    return replace_header(rounds_run(prefixes=3), extra=read_extras({"sites": sites, "ledger": ledger}))


def test_counts_are_scaled_from_samples_to_steps(probed: Run) -> None:
    by_process = culprits(probed)
    assert list(by_process) == ["engine_core"]
    assert by_process["engine_core"].level == "sites"
    first = by_process["engine_core"].rows[0]
    assert (first.type, first.line, first.count) == ("list", 984, 900)
    assert first.share == pytest.approx(0.9)
    assert first.per_step == pytest.approx(900 / 4 * 80 / 500)


def test_the_page_names_the_culprit_and_its_line(probed: Run) -> None:
    html = run_page(RunAnalysis(probed))
    assert "vllm/distributed/shm_broadcast.py:984" in html
    assert "/opt/venv" not in html
    assert "<script>document.title" not in html


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"sites": None},
        {"sites": {"steps": 0, "processes": {"1": {"rows": [row("list", 1)], "samples": 0}}}},
        {"sites": {"processes": {"99": {"rows": [row("list", 1)]}, "x": {}, "0": 3}}},
        {"sites": {"processes": {"0": {"rows": [{}, None, {"count": float("nan")}]}}}},
    ],
)
def test_incomplete_probe_data_raises_nothing(stored: dict[str, Any]) -> None:
    run = replace_header(rounds_run(prefixes=2), extra=read_extras(stored))
    for sampled in culprits(run).values():
        assert all(row.per_step is None for row in sampled.rows)
