"""Collection accounting on real engines: every probe level, and stacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtune.reading.analysis.culprits import culprits
from tests.lab.engine.real import Ran, profiled

pytestmark = [pytest.mark.engine, pytest.mark.full, pytest.mark.timeout(1200)]

LOAD = "decode:requests=256,prompt=48,output=100"
ENGINE = ("--max-num-seqs", "256")


def run(folder: Path, *arguments: str, load: str = LOAD) -> Ran:
    ran = profiled(folder, "tiny-opt", "-w", load, *arguments, engine=ENGINE)
    assert not ran.run.header.probe.disabled, ran.run.header.probe.disabled
    assert Path(ran.facts["page"]).stat().st_size > 100_000
    return ran


def test_sites_name_the_sampled_tokens_of_stock(tmp_path: Path) -> None:
    ran = run(tmp_path, "--probe", "sites", "--core", "stock")
    by_process = culprits(ran.run)["engine_core"]
    first = by_process.rows[0]
    assert by_process.level == "sites" and by_process.samples >= 1
    assert all(
        row.per_step is not None and "/kvtune/plugin/probe/" not in row.file for row in by_process.rows
    )
    assert first.type == "list" and first.file.endswith("shm_broadcast.py")
    assert (
        first.per_step is not None and 100 < first.per_step <= 257
    )  # a list a request, and the list of them
    assert ran.facts["valid"]["timings"] is True


def test_types_and_stacks(tmp_path: Path) -> None:
    # A census is taken at every 16th collection, and EngineCore makes one for about twenty new requests.
    longer = "decode:requests=512,prompt=48,output=100"
    ran = run(tmp_path, "--probe", "types", "--stacks", "--core", "stock", load=longer)
    by_process = culprits(ran.run)["engine_core"]
    assert by_process.level == "types" and by_process.samples >= 1
    # Which type is the first depends on the moment of the census.
    assert "list" in [row.type for row in by_process.rows] and not any(row.file for row in by_process.rows)
    assert ran.facts["valid"]["timings"] is False
    stacks = ran.facts["stacks"]["engine_core"]
    assert stacks["top"][0]["share"] > 0 and sum(f["share"] for f in stacks["top"]) <= 1.001
    assert (Path(ran.facts["run_file"]).parent / stacks["file"]).is_file()
    assert "speedscope" in stacks["file"]
