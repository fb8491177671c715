"""`kvtune evidence`, put together: runs cases, judges each figure, gives one plain object. CLI's process."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from kvtune import __version__
from kvtune.analysis.comparison.compare import value_at
from kvtune.analysis.rebuild import workload_of
from kvtune.analysis.run import RunAnalysis
from kvtune.analysis.summary import summary
from kvtune.engine.messages import Event
from kvtune.engine.resolve import check_engine
from kvtune.errors import KvtuneError, UsageError
from kvtune.evidence.cases import SCALES, Scale
from kvtune.evidence.claims import CLAIMS, THROUGHPUT, Asked, Case, CaseSide, Claim
from kvtune.evidence.extras import free_list, planned_blocks, real_answers, row
from kvtune.evidence.judge import ratio, reason
from kvtune.evidence.runs import CaseRun, command, run_case, run_turns
from kvtune.run.file import read_run
from kvtune.run.machine import this_host

SCHEMA = 1
NO_GPU = "Not yet measured on a GPU: these loads are sized for a CPU engine (on a GPU: kvtune evidence --scale gpu)."
FREE_LIST, AGGREGATE, REAL = "free-list", "aggregate-blocks", "real-weights"
NAMES = (*(claim.name for claim in CLAIMS), REAL)

Start = Callable[[Case, CaseSide, int], Callable[[Event], None]]
Summaries = Mapping[tuple[str, str], list[dict[str, Any]]]


def chosen(only: str) -> tuple[str, ...]:
    """Names of claims from a comma list; all for an empty one."""
    names = tuple(name.strip() for name in only.split(",") if name.strip()) or NAMES
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise UsageError(f"--only {', '.join(unknown)} is no claim", f"it takes {', '.join(NAMES)}")
    return names


def chosen_scale(name: str) -> Scale:
    """`auto`: a GPU's cases where the driver lists a GPU; asked of the driver, so that no torch is imported here."""
    if name == "auto":
        lister = shutil.which("nvidia-smi")
        listed = (
            subprocess.run([lister, "-L"], capture_output=True, text=True, check=False) if lister else None
        )
        name = "gpu" if listed is not None and "GPU" in listed.stdout else "cpu"
    if name not in SCALES:
        raise UsageError(f"--scale {name} is none", f"it takes auto, {', '.join(SCALES)}")
    return SCALES[name]


def cases_of(names: Sequence[str], scale: Scale) -> list[Case]:
    """The cases of this scale that these claims need, each once."""
    needed = dict.fromkeys(f.case for claim in CLAIMS if claim.name in names for f in claim.figures)
    return [scale.cases[name] for name in needed if name in scale.cases]


def evidence(
    names: Sequence[str], scale: Scale, folder: Path, on_start: Start, on_turn: Callable[[Case, int], None]
) -> dict[str, Any]:
    """Run what is missing, judge all. A run that failed is named under its claim; the others stand."""
    version = check_engine()
    began = monotonic()
    done: list[CaseRun] = []
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in cases_of(names, scale):
        if not case.turns:
            done += run_case(case, folder, on_start)
            continue
        try:
            found = run_turns(case, folder, lambda turn, case=case: on_turn(case, turn))  # type: ignore[misc]
        except KvtuneError as error:
            done.append(CaseRun(case.name, "all sides", 0, "", error.message))
            continue
        seen |= {(case.name, side): told for side, told in found.items()}
    for one in done:
        if one.path:
            run = read_run(folder / one.path)
            seen.setdefault((one.case, one.side), []).append(summary(RunAnalysis(run, workload_of(run))))
    claims = [_claim(claim, scale, seen, done) for claim in CLAIMS if claim.name in names]
    for claim in claims:
        extra = {FREE_LIST: free_list, AGGREGATE: planned_blocks}.get(claim["name"])
        if extra is not None:
            figures, why = extra()
            claim["figures"] += figures
            claim["why"] += why
            claim["verdict"] = in_short(claim["figures"])
    if REAL in names:
        figures, why = real_answers()
        claims.append(
            {
                "name": REAL,
                "title": "Real weights: Gemma-3 270M answers the same with the core on and off",
                "published": "accuracy unchanged",
                "verdict": in_short(figures),
                "figures": figures,
                "why": why,
            }
        )
    host = this_host()
    devices = {s["engine"]["device_name"] or s["engine"]["device"] for runs in seen.values() for s in runs}
    return {
        "schema": SCHEMA,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "vllm": version,
            "python": platform.python_version(),
            "kvtune": __version__,
            "cpu": host.cpu,
            "cores": host.cores,
            "device": ", ".join(sorted(devices)),
        },
        "scale": scale.note,
        "gpu": "Measured on a GPU." if scale.name == "gpu" else NO_GPU,
        "runs": len(done) + sum(len(case.sides) for case in cases_of(names, scale) if case.turns),
        "wall_s": round(monotonic() - began, 1),
        "command": f"kvtune evidence --scale {scale.name}"
        + ("" if set(names) == set(NAMES) else f" --only {','.join(names)}"),
        "claims": claims,
    }


def _claim(claim: Claim, scale: Scale, seen: Summaries, done: Sequence[CaseRun]) -> dict[str, Any]:
    figures = [
        _figure(claim.name, asked, scale, seen) for asked in claim.figures if asked.case in scale.cases
    ]
    cases = {asked.case for asked in claim.figures}
    why = [f"failed: {d.case}, {d.side}: {d.why}" for d in done if d.why and d.case in cases]
    first = claim.figures[0]
    # What the host and the collector take bounds a gain in speed, not one in hits.
    if first.measure == THROUGHPUT and any(f["verdict"] not in ("holds", "not measured") for f in figures):
        baseline = seen.get((first.case, first.a))
        why += [text] if baseline and (text := reason(baseline[0])) else []
    return {
        "name": claim.name,
        "title": claim.title,
        "published": claim.published,
        "verdict": in_short(figures),
        "figures": figures,
        "why": why,
    }


def in_short(figures: Sequence[Mapping[str, Any]]) -> str:
    """How many figures of a claim hold, in words."""
    counts: dict[str, int] = {}
    for figure in figures:
        counts[figure["verdict"]] = counts.get(figure["verdict"], 0) + 1
    return "Here: " + ", ".join(f"{n} of {len(figures)} {verdict}" for verdict, n in counts.items()) + "."


def _figure(claim: str, asked: Asked, scale: Scale, seen: Summaries) -> dict[str, Any]:
    case = scale.cases[asked.case]
    sides = {side.name: side for side in case.sides if side.name in (asked.a, asked.b)}
    a, b = (
        [value for s in seen.get((asked.case, side), []) if (value := value_at(s, asked.measure)) is not None]
        for side in (asked.a, asked.b)
    )
    return row(
        ratio(a, b, count=asked.count, paired=case.turns > 0),
        title=f"{asked.title}: {asked.b} over {asked.a}",
        work=f"{case.model} {case.workload}",
        direction=asked.direction,
        published=asked.published,
        # A side alone is for a closer look; turns are what gives the figure.
        commands=([f"kvtune evidence --scale {scale.name} --only {claim}"] if case.turns else [])
        + [command(case, side) for side in sides.values()],
    )
