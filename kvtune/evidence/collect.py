"""What `kvtune evidence` does: run the cases, judge each figure, return one JSON object. In the CLI's process."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic

from kvtune import __version__
from kvtune.analysis.claim_results import ClaimResult, EvidenceResult, FigureResult, MachineResult
from kvtune.analysis.comparison.compare import value_at
from kvtune.analysis.rebuild import workload_of
from kvtune.analysis.run import RunAnalysis
from kvtune.analysis.summary import summary
from kvtune.engine.messages import Event
from kvtune.engine.resolve import check_engine
from kvtune.errors import KvtuneError, UsageError
from kvtune.evidence.cases import SCALES, Scale
from kvtune.evidence.claims import CLAIMS, THROUGHPUT, Case, CaseSide, Claim, ClaimFigure
from kvtune.evidence.extras import free_list, planned_blocks, real_answers, row
from kvtune.evidence.judge import ratio, reason
from kvtune.evidence.runs import CaseRun, command, run_case, run_turns
from kvtune.evidence.turns import TurnFigures
from kvtune.run.file import read_run
from kvtune.run.machine import this_host

SCHEMA = 1
NO_GPU = "Not yet measured on a GPU: these loads are sized for a CPU engine (on a GPU: kvtune evidence --scale gpu)."
FREE_LIST, AGGREGATE, REAL = "free-list", "aggregate-blocks", "real-weights"
NAMES = (*(claim.name for claim in CLAIMS), REAL)

Start = Callable[[Case, CaseSide, int], Callable[[Event], None]]
Summaries = dict[tuple[str, str], list[TurnFigures]]
"""By case and side: the `--json` objects of runs, or as much of them as a turn measures."""


def chosen(only: str) -> tuple[str, ...]:
    """Names of claims from a comma list; all for an empty one."""
    names = tuple(name.strip() for name in only.split(",") if name.strip()) or NAMES
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise UsageError(f"--only: there is no claim {', '.join(unknown)}", f"claims: {', '.join(NAMES)}")
    return names


def chosen_scale(name: str) -> Scale:
    """`auto`: a GPU's cases where nvidia-smi lists a GPU (torch would have to be imported to ask it)."""
    if name == "auto":
        lister = shutil.which("nvidia-smi")
        listed = (
            subprocess.run([lister, "-L"], capture_output=True, text=True, check=False) if lister else None
        )
        name = "gpu" if listed is not None and "GPU" in listed.stdout else "cpu"
    if name not in SCALES:
        raise UsageError(
            f"--scale must be auto, {' or '.join(SCALES)}, not '{name}'",
            "auto takes gpu if nvidia-smi lists one",
        )
    return SCALES[name]


def cases_of(names: Sequence[str], scale: Scale) -> list[Case]:
    """The cases of this scale that these claims need, each once."""
    needed = dict.fromkeys(f.case for claim in CLAIMS if claim.name in names for f in claim.figures)
    return [scale.cases[name] for name in needed if name in scale.cases]


def evidence(
    names: Sequence[str], scale: Scale, folder: Path, on_start: Start, on_turn: Callable[[Case, int], None]
) -> EvidenceResult:
    """Run what is missing, judge everything. A run that failed is named under its claim; the others count."""
    version = check_engine()
    began = monotonic()
    cases = cases_of(names, scale)
    runs, summaries = _measure(cases, folder, on_start, on_turn)
    claims = [_claim(claim, scale, summaries, runs) for claim in CLAIMS if claim.name in names]
    if REAL in names:
        figures, why = real_answers()
        title = "Real weights: Gemma-3 270M answers the same with the core on and off"
        claims.append(_judged(REAL, title, "accuracy unchanged", figures, why))
    engines = [s["engine"] for each in summaries.values() for s in each]
    only = "" if set(names) == set(NAMES) else f" --only {','.join(names)}"
    return {
        "schema": SCHEMA,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": _machine(version, {e["device_name"] or e["device"] for e in engines}),
        "scale": scale.note,
        "gpu": "Measured on a GPU." if scale.name == "gpu" else NO_GPU,
        "runs": len(runs) + sum(len(case.sides) for case in cases if case.turns),
        "wall_s": round(monotonic() - began, 1),
        "command": f"kvtune evidence --scale {scale.name}{only}",
        "claims": claims,
    }


def _measure(
    cases: Sequence[Case], folder: Path, on_start: Start, on_turn: Callable[[Case, int], None]
) -> tuple[list[CaseRun], Summaries]:
    """Whole runs (failed ones too), and the summaries of all runs and turns by case and side."""
    runs: list[CaseRun] = []
    summaries: Summaries = {}
    for case in cases:
        if not case.turns:
            runs += run_case(case, folder, on_start)
            continue
        try:
            turns = run_turns(case, folder, lambda turn, case=case: on_turn(case, turn))  # type: ignore[misc]
        except KvtuneError as error:
            runs.append(CaseRun(case.name, "all sides", 0, "", error.message))
            continue
        summaries |= {(case.name, side): each for side, each in turns.items()}
    for one in runs:
        if one.path:
            run = read_run(folder / one.path)
            summaries.setdefault((one.case, one.side), []).append(summary(RunAnalysis(run, workload_of(run))))
    return runs, summaries


def _machine(vllm: str, devices: set[str]) -> MachineResult:
    host = this_host()
    return {
        "vllm": vllm,
        "python": platform.python_version(),
        "kvtune": __version__,
        "cpu": host.cpu,
        "cores": host.cores,
        "device": ", ".join(sorted(devices)),
    }


def _judged(
    name: str, title: str, published: str, figures: list[FigureResult], why: list[str]
) -> ClaimResult:
    return {
        "name": name,
        "title": title,
        "published": published,
        "verdict": in_short(figures),
        "figures": figures,
        "why": why,
    }


def _claim(claim: Claim, scale: Scale, summaries: Summaries, runs: Sequence[CaseRun]) -> ClaimResult:
    figures = [
        _figure(claim.name, figure, scale, summaries)
        for figure in claim.figures
        if figure.case in scale.cases
    ]
    cases = {figure.case for figure in claim.figures}
    why = [f"failed: {r.case}, {r.side}: {r.why}" for r in runs if r.why and r.case in cases]
    first = claim.figures[0]
    # The time of the host and the collector limits a gain in speed, not one in hits.
    if first.measure == THROUGHPUT and any(f["verdict"] not in ("holds", "not measured") for f in figures):
        baseline = summaries.get((first.case, first.a))
        why += [text] if baseline and (text := reason(baseline[0])) else []
    extra = {FREE_LIST: free_list, AGGREGATE: planned_blocks}.get(claim.name)
    if extra is not None:
        more_figures, more_why = extra()
        figures += more_figures
        why += more_why
    return _judged(claim.name, claim.title, claim.published, figures, why)


def in_short(figures: Sequence[FigureResult]) -> str:
    """How many figures of a claim hold, in words."""
    counts: dict[str, int] = {}
    for figure in figures:
        counts[figure["verdict"]] = counts.get(figure["verdict"], 0) + 1
    return "Here: " + ", ".join(f"{n} of {len(figures)} {verdict}" for verdict, n in counts.items()) + "."


def _figure(claim: str, figure: ClaimFigure, scale: Scale, summaries: Summaries) -> FigureResult:
    case = scale.cases[figure.case]
    sides = {side.name: side for side in case.sides if side.name in (figure.a, figure.b)}
    a, b = (
        [
            value
            for s in summaries.get((figure.case, side), [])
            if (value := value_at(s, figure.measure)) is not None
        ]
        for side in (figure.a, figure.b)
    )
    return row(
        ratio(a, b, count=figure.count, paired=case.turns > 0),
        title=f"{figure.title}: {figure.b} over {figure.a}",
        work=f"{case.model} {case.workload}",
        direction=figure.direction,
        published=figure.published,
        # The first command measures the figure; the others run one side alone, for a closer look.
        commands=([f"kvtune evidence --scale {scale.name} --only {claim}"] if case.turns else [])
        + [command(case, side) for side in sides.values()],
    )
