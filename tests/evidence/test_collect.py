"""The claims as data, the journal of runs, and what is made of them; no engine starts here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtune.core.settings import parse
from kvtune.engine.models import NAMES as TINY
from kvtune.engine.models import SHAPES
from kvtune.errors import KvtuneError, UsageError
from kvtune.evidence import collect as published
from kvtune.evidence import extras as published_extras
from kvtune.evidence import runs as evidence
from kvtune.evidence.cases import CPU, GPU, SCALES, STOCK, Scale
from kvtune.evidence.claims import CLAIMS, Case, CaseSide
from kvtune.evidence.collect import NAMES, _claim, cases_of, chosen, chosen_scale, in_short
from kvtune.evidence.extras import planned_blocks, real_answers
from kvtune.evidence.turns import in_turns
from kvtune.report.pages.evidence import evidence_page
from kvtune.workload.spec import build

AT_SCALE = [(scale, case) for scale in SCALES.values() for case in scale.cases.values()]


@pytest.mark.parametrize("scale", SCALES.values(), ids=lambda s: s.name)
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: c.name)
def test_claims_name_cases_and_sides_that_are_there(claim: Any, scale: Scale) -> None:
    for asked in claim.figures:
        if asked.case in scale.cases:
            sides = [side.name for side in scale.cases[asked.case].sides]
            if scale is CPU:
                assert asked.a in sides and asked.b in sides
            assert asked.a != asked.b


def test_a_cpu_has_cases_for_every_claim() -> None:
    for claim in CLAIMS:
        assert {asked.case for asked in claim.figures} & set(CPU.cases), claim.name


def test_what_runs_once_is_only_counted() -> None:
    for claim in CLAIMS:
        for asked in claim.figures:
            for scale in SCALES.values():
                if asked.case in scale.cases and scale.cases[asked.case].repeats < 2:
                    assert asked.count or scale.cases[asked.case].turns >= 4


@pytest.mark.parametrize(("scale", "case"), AT_SCALE, ids=lambda x: x.name)
def test_cases_can_run(scale: Scale, case: Case) -> None:
    assert case.model in (TINY if scale is CPU else SHAPES)
    assert build(case.workload, seed=0).requests
    for side in case.sides:
        parse(side.settings)


def test_sides_take_turns_and_turn_round() -> None:
    sides = (STOCK, CaseSide("a"), CaseSide("b"))
    turns = [(n, side.name) for n, side in evidence.order(Case("c", "tiny-opt", "decode", sides, 2))]
    assert turns == [(0, "stock"), (0, "a"), (0, "b"), (1, "b"), (1, "a"), (1, "stock")]


def test_a_command_repeats_a_side() -> None:
    case = GPU.cases["decode-short"]
    assert evidence.command(case, STOCK).endswith("--core stock")
    assert "--set core.rows=true" in evidence.command(case, case.sides[1])


def test_runs_of_the_journal_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("c", "tiny-opt", "decode:requests=4", (STOCK, CaseSide("a")), 2)
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
    assert [case.name for case in cases_of(chosen("pinning"), CPU)] == ["many prefixes", "half the prefixes"]
    with pytest.raises(UsageError, match="there is no claim speed"):
        chosen("pinning,speed")


@pytest.mark.parametrize(("listed", "scale"), [("GPU 0: NVIDIA H100", GPU), ("No devices found", CPU)])
def test_the_scale_is_what_the_driver_lists(
    listed: str, scale: Scale, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lister = tmp_path / "nvidia-smi"
    lister.write_text(f"#!/bin/sh\necho '{listed}'\n")
    lister.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert chosen_scale("auto") is scale
    assert chosen_scale("cpu") is CPU
    with pytest.raises(UsageError, match="tpu"):
        chosen_scale("tpu")


def test_a_machine_without_a_driver_is_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert chosen_scale("auto") is CPU


def test_real_answers_without_weights_say_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    figures, why = real_answers()
    assert {figure["verdict"] for figure in figures} == {"not measured"}
    assert "kvtune prepare gemma3-270m" in why[0]


@pytest.mark.parametrize(
    ("ours", "verdicts"), [([[1], [2]], ["holds", "holds"]), ([[1], [3]], ["does not hold here"] * 2)]
)
def test_real_answers_are_counted(
    ours: list[list[int]], verdicts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtune.evidence import answers, reading
    from kvtune.evidence.answers import Answered

    asked = [reading.Question(0, "Where?", "Rome"), reading.Question(1, "Where?", "Oslo")]
    words = {1: " Rome.", 2: " Oslo\n", 3: " Lima"}

    def ask(folder: Path, core: str, questions: Any, blocks: int) -> Answered:
        tokens = [[1], [2]] if core == "stock" else ours
        texts = [words[t[0]] for t in tokens]
        return Answered(tokens=tokens, texts=texts, prompt_tokens=9, hit_tokens=3, preemptions=0)

    monkeypatch.setattr(published_extras.gemma, "is_prepared", lambda folder: True)
    monkeypatch.setattr(answers, "answers", ask)
    monkeypatch.setattr(reading, "questions", lambda: asked)
    figures, _ = real_answers()
    assert [figure["verdict"] for figure in figures[:2]] == verdicts


def test_only_what_was_asked_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(published, "check_engine", lambda: "0.32.0")
    measured = published.evidence(
        ["real-weights"], CPU, tmp_path, lambda *_: lambda event: None, lambda *_: None
    )
    assert [claim["name"] for claim in measured["claims"]] == ["real-weights"]
    assert measured["command"] == "kvtune evidence --scale cpu --only real-weights" and measured["runs"] == 0


def turned(case: Case, on_turn: Any) -> dict[str, list[dict[str, Any]]]:
    """Engines that make tokens at speeds that drift, arrays always 1.3 times as many as stock."""
    told = {}
    for number, side in enumerate(case.sides):
        told[side.name] = [
            {
                "engine": {"device": "cpu", "device_name": ""},
                "throughput_tok_s": drift * (1 + 0.1 * number),
                "gc": {
                    "engine_core": {"collections": [5 - number, 0, 0], "pause_ms": {"total": 4.0 - number}}
                },
                "host_us": {"schedule": 10.0, "update": 5.0},
                "step_ms": {"mean": 1.0},
            }
            for drift in (100.0, 50.0, 200.0, 70.0)
        ]
    return told


def test_turns_are_compared_in_pairs_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "check_engine", lambda: "0.32.0")
    monkeypatch.setattr(evidence, "in_turns", turned)
    asked = (["token-rows"], CPU, tmp_path, lambda *_: lambda event: None, lambda *_: None)
    measured = published.evidence(*asked)
    speed = measured["claims"][0]["figures"][0]
    assert speed["ratio"] == pytest.approx(1.3) and speed["low"] == pytest.approx(1.3) and speed["runs"] == 4
    assert speed["verdict"] == "holds" and measured["runs"] == 4
    assert speed["commands"][0] == "kvtune evidence --scale cpu --only token-rows"

    def again(case: Case, on_turn: Any) -> Any:
        raise AssertionError("measured again")

    monkeypatch.setattr(evidence, "in_turns", again)
    assert published.evidence(*asked)["claims"] == measured["claims"]


def test_engines_that_fail_are_named_under_their_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(case: Case, on_turn: Any) -> Any:
        raise KvtuneError("decode-heavy, arrays: ValueError: no memory", "see whether it runs alone")

    monkeypatch.setattr(published, "check_engine", lambda: "0.32.0")
    monkeypatch.setattr(evidence, "in_turns", failing)
    asked = (["token-rows"], CPU, tmp_path, lambda *_: lambda event: None, lambda *_: None)
    claim = published.evidence(*asked)["claims"][0]
    assert {figure["verdict"] for figure in claim["figures"]} == {"not measured"}
    assert claim["why"] == ["failed: decode-heavy, all sides: decode-heavy, arrays: ValueError: no memory"]


@pytest.mark.full
def test_an_engine_that_does_not_start_says_why() -> None:
    """A real child: its model is refused before any engine is built."""
    case = Case("c", "no-such-folder/", "decode:requests=2", (STOCK,), 1, turns=3)
    with pytest.raises(KvtuneError, match=r"c, stock: .*no-such-folder"):
        in_turns(case, lambda turn: None)


def test_a_claim_without_runs_says_so_and_is_drawn() -> None:
    hostile = "<script>alert(1)</script>"
    done = [evidence.CaseRun("decode-heavy", "stock", 0, "", hostile)]
    claim = _claim(CLAIMS[0], CPU, {}, done)
    assert {figure["verdict"] for figure in claim["figures"]} == {"not measured"}
    figures, why = planned_blocks()
    aggregate = {**claim, "name": "a", "figures": figures, "why": why, "verdict": in_short(figures)}
    result = {
        "schema": 1,
        "made_at": "2026-01-01",
        "machine": {
            "vllm": "0.32.0",
            "python": "3.11",
            "kvtune": "0",
            "cpu": hostile,
            "cores": 2,
            "device": "cpu",
        },
        "scale": "small",
        "gpu": "none",
        "command": "make evidence",
        "runs": 1,
        "wall_s": 2.5,
        "claims": [claim, aggregate],
    }
    page = evidence_page(result)
    assert hostile not in page and "not measured" in page


def test_the_aggregate_rule_makes_smaller_blocks() -> None:
    for figure in planned_blocks()[0]:
        assert 0 < figure["ratio"] < 1
