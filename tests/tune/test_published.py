"""The claims as data, the journal of runs, and what is made of them; no engine starts here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtune.core.settings import parse
from kvtune.engine import evidence
from kvtune.engine.claims import CASES, CLAIMS, STOCK, Case, Side
from kvtune.engine.models import NAMES as MODELS
from kvtune.errors import UsageError
from kvtune.report.evidence_page import evidence_page
from kvtune.tune.published import NAMES, _aggregate, _claim, cases_of, chosen, value_at
from kvtune.workload.spec import build


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.name)
def test_claims_name_cases_and_sides_that_are_there(claim: Any) -> None:
    for asked in claim.figures:
        sides = [side.name for side in CASES[asked.case].sides]
        assert asked.a in sides and asked.b in sides and asked.a != asked.b


@pytest.mark.parametrize("case", CASES.values(), ids=lambda c: c.name)
def test_cases_can_run(case: Case) -> None:
    assert case.model in MODELS
    assert build(case.workload, seed=0).requests
    assert case.repeats >= 2
    for side in case.sides:
        parse(side.settings)


def test_sides_take_turns_and_turn_round() -> None:
    sides = (STOCK, Side("a"), Side("b"))
    turns = [(n, side.name) for n, side in evidence.order(Case("c", "tiny-opt", "decode", sides, 2))]
    assert turns == [(0, "stock"), (0, "a"), (0, "b"), (1, "b"), (1, "a"), (1, "stock")]


def test_a_command_repeats_a_side() -> None:
    case = CASES["decode-short"]
    assert evidence.command(case, STOCK).endswith("--core stock -- --max-num-seqs 512")
    assert "--set core.rows=true" in evidence.command(case, case.sides[1])


def test_runs_of_the_journal_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("c", "tiny-opt", "decode:requests=4", (STOCK, Side("a")), 2)
    made: list[str] = []

    class Profiled:
        error = None

        def __init__(self, path: Path) -> None:
            self.path = path

    def profile(job: Any, on_event: Any) -> Any:
        path = job.output / f"{len(made)}.kvrun"
        path.write_bytes(b"")
        made.append(job.core)
        return Profiled(path)

    monkeypatch.setattr(evidence, "profile", profile)
    first = evidence.run_case(case, tmp_path, lambda *_: lambda event: None)
    assert made == ["stock", "kvtune", "kvtune", "stock"]
    with (tmp_path / evidence.JOURNAL).open("a") as journal:
        journal.write('{"key": "torn')
    (tmp_path / "1.kvrun").unlink()
    second = evidence.run_case(case, tmp_path, lambda *_: lambda event: None)
    assert len(made) == 5 and [d.path for d in second if d.path != "4.kvrun"] == [
        d.path for d in first if d.path != "1.kvrun"
    ]


def test_claims_are_chosen_by_name() -> None:
    assert chosen("") == NAMES
    assert [case.name for case in cases_of(chosen("pinning"))] == ["24 prefixes", "12 prefixes"]
    with pytest.raises(UsageError, match="speed is no claim"):
        chosen("pinning,speed")


def test_value_at_goes_through_lists() -> None:
    found = {"rounds": [{"ttft_ms_mean": 1}, {"ttft_ms_mean": 2.5}], "gc": {}}
    assert value_at(found, "rounds.1.ttft_ms_mean") == 2.5
    assert value_at(found, "rounds.2.ttft_ms_mean") is None
    assert value_at(found, "gc.engine_core.collections.0") is None


def test_a_claim_without_runs_says_so_and_is_drawn() -> None:
    hostile = "<script>alert(1)</script>"
    done = [evidence.Done("decode-heavy", "stock", 0, "", hostile)]
    claim = _claim(CLAIMS[0], {}, done)
    assert {figure["verdict"] for figure in claim["figures"]} == {"not measured"}
    found = {
        "schema": 1,
        "made_at": "2026-01-01",
        "machine": {"vllm": "0.32.0", "python": "3.11", "kvtune": "0", "cpu": hostile, "cores": 2},
        "scale": "small",
        "gpu": "none",
        "command": "make evidence",
        "claims": [claim, _aggregate()],
    }
    page = evidence_page(found)
    assert hostile not in page and "not measured" in page


def test_the_aggregate_rule_makes_smaller_blocks() -> None:
    for figure in _aggregate()["figures"]:
        assert 0 < figure["ratio"] < 1
