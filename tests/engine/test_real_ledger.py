"""Collection accounting on real engines: every probe level, stacks, an ablation that is interrupted and resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtune.analysis.comparison.ablation import FIGURES, stored
from kvtune.analysis.culprits import culprits
from kvtune.run.file import read_run
from tests.engine.real import Ran, kvtune, profiled

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
    first = culprits(ran.run)["engine_core"].rows[0]
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


def test_an_ablation_is_cut_off_goes_on_and_ends_in_one_run_file(tmp_path: Path) -> None:
    arguments = (
        "profile", "tiny-opt", "-w", "decode:requests=64,prompt=16,output=48", "--ablate-only", "freeze",
        "--repeat", "2", "-o", str(tmp_path),
    )  # fmt: skip
    first = kvtune(*arguments, "--ablate-budget", "0.05", output=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "2 variants x 2 = 4 engine runs" in first.stderr
    assert "1 of 4 runs were made: the budget of 0.05 min is used up" in first.stdout
    second = kvtune(*arguments, "--json", output=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "1 of them done before" in second.stderr and "left, until" in second.stderr
    printed = json.loads(second.stdout)
    kept = stored(read_run(Path(printed["run_file"])))
    assert kept is not None and (kept.done, kept.planned, kept.why) == (4, 4, "")
    (freeze,) = kept.turned
    assert [w.path for w in freeze.worths] == list(FIGURES)
    longer_runs = {"ceiling_us_per_token", "rss_growth_bytes_s"}  # figures that a run of a second may lack
    assert all(w.low is not None and w.high is not None for w in freeze.worths if w.path not in longer_runs)
    assert Path(printed["page"]).is_file()
    assert len(list(Path(printed["folder"]).glob("*.kvrun"))) == 4


def test_two_runs_at_once_in_one_folder(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    load = "decode:requests=16,prompt=16,output=64"
    with ThreadPoolExecutor(2) as pool:
        findings = list(pool.map(lambda _: profiled(tmp_path, "tiny-opt", "-w", load), range(2)))
    assert findings[0].facts["run_file"] != findings[1].facts["run_file"]
    for ran in findings:
        assert ran.facts["finished"] == 16 and ran.run.header.state == "complete"
        assert int(ran.run.table("steps")["scheduled_tokens"].sum()) == 16 * (16 + 63)
    pids = [{p.pid for p in ran.run.header.processes} for ran in findings]
    assert not pids[0] & pids[1]
