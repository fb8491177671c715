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
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard what an earlier call measured.")] = False,
    open_: options.Open = False,
    json: options.Json = False,
) -> int:
    """Measure each published claim against stock vLLM; after an interruption the same command resumes."""
    import json as encoder
    import sys

    from kvtune.cli.views.plan import announce, evidence_plan
    from kvtune.cli.views.progress import ProgressView
    from kvtune.errors import EXIT_FAILED
    from kvtune.evidence.claims import Case, CaseSide
    from kvtune.evidence.collect import cases_of, chosen, chosen_scale
    from kvtune.evidence.collect import evidence as measure
    from kvtune.evidence.runs import JOURNAL
    from kvtune.report.console.evidence import print_evidence
    from kvtune.report.files import write_new
    from kvtune.report.pages.evidence import evidence_page

    names = chosen(only)
    at = chosen_scale(scale)
    folder = output / "evidence-runs"
    if fresh:
        for kept in (folder / JOURNAL, *folder.glob("turns-*.json")):
            kept.unlink(missing_ok=True)
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
    write_new(encoder.dumps(measured, indent=1) + "\n", output / "evidence.json", force=True)
    write_new(evidence_page(measured), output / "evidence.html", force=True)
    if json:
        print(encoder.dumps(measured))
    else:
        print_evidence(measured)
        print(f"page  {output / 'evidence.html'}")
    if open_:
        from kvtune.cli.views.browser import open_page

        open_page(output / "evidence.html")
    failed = any(line.startswith("failed: ") for claim in measured["claims"] for line in claim["why"])
    return EXIT_FAILED if failed else 0
