"""`kvtune evidence`: the published results on vLLM's KV cache, measured again on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtune.cli import options
from kvtune.run.config import OUTPUT_VARIABLE, REPORTS


def evidence(
    only: Annotated[str, typer.Option(help="Only these claims, separated by commas. Default: all.")] = "",
    scale: Annotated[str, typer.Option(help="Size of the work: cpu, gpu or auto (by nvidia-smi).")] = "auto",
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            envvar=OUTPUT_VARIABLE,
            help="Folder for evidence.html, evidence.json and the runs.",
        ),
    ] = REPORTS,
    force: options.Force = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard what an earlier call measured.")] = False,
    open_: options.Open = False,
    json: options.Json = False,
) -> int:
    """Measure each published claim against stock vLLM; after an interruption the same command resumes."""
    import json as encoder
    import sys

    from kvtune.analysis.claim_results import IDENTITY
    from kvtune.cli.views.plan import announce, evidence_plan
    from kvtune.cli.views.progress import ProgressView
    from kvtune.errors import EXIT_FAILED
    from kvtune.evidence.claims import Case, CaseSide
    from kvtune.evidence.collect import cases_of, chosen, chosen_scale
    from kvtune.evidence.collect import evidence as measure
    from kvtune.evidence.runs import discard
    from kvtune.report.console.evidence import print_evidence
    from kvtune.report.pages.evidence import evidence_page
    from kvtune.run.signature import refuse_foreign, signature, write_own

    names = chosen(only)
    at = chosen_scale(scale)
    folder = output / "evidence-runs"
    result, page = output / "evidence.json", output / "evidence.html"
    for path in (result, page):
        refuse_foreign(path, IDENTITY, force=force)
    if fresh:
        discard(folder)
    cases = cases_of(names, at)

    starts = sum(len(case.sides) * (1 if case.turns else case.repeats) for case in cases)
    announce(evidence_plan(len(cases), starts, folder))

    def tell(case: Case, what: str) -> None:
        number = f"case {cases.index(case) + 1} of {len(cases)}"
        print(f"{number}: {case.name}, {what}", file=sys.stderr, flush=True)

    def start(case: Case, side: CaseSide, repeat: int) -> ProgressView:
        tell(case, f"{side.name}, run {repeat + 1} of {case.repeats}")
        return ProgressView(0, side.name, quiet=True)

    def turn(case: Case, number: int) -> None:
        tell(case, f"{len(case.sides)} engines, turn {number} of {case.turns}")

    measured = measure(names, at, folder, start, turn)
    text = encoder.dumps({"made_by": signature(IDENTITY), **measured}, indent=1)
    write_own(f"{text}\n".encode(), result, IDENTITY, force=force)
    write_own(evidence_page(measured).encode(), page, IDENTITY, force=force)
    if json:
        print(encoder.dumps(measured))
    else:
        print_evidence(measured)
        print(f"page  {page}")
    if open_:
        from kvtune.cli.views.browser import open_page

        open_page(page)
    failed = any(line.startswith("failed: ") for claim in measured["claims"] for line in claim["why"])
    return EXIT_FAILED if failed else 0
