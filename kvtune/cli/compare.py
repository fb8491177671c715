"""`kvtune compare A B [C..]`: differences with 95 % intervals, and an exit code for CI."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated

from kvtune.cli import options
from kvtune.cli.notices import always
from kvtune.cli.query import Query, argument, either, option


@dataclass(frozen=True, kw_only=True)
class CompareQuery(Query):
    runs: list[Path] = argument(MISSING, "RUNS...", parser=options.run_path)("""Run files, or `last`, `last~1`
        ..; the others are compared with the first.""")
    fail_on: str = option("")("Exit 1 if this holds, e.g. 'ttft_ms.mean > +5%'.")
    trace: Annotated[options.RunTrace, *either("for the causes of misses", "json fail_on")] = None
    json: options.Json = False
    md: options.Md = False
    page: options.Page = None
    anyway: bool = option(False)("""Compare although model, workload, versions or device differ; let
        --fail-on judge times of one run a side.""")


def compare(query: CompareQuery) -> int:
    """Compare runs of one workload: each figure's difference, its 95 % interval and a verdict.

    Exit codes: 1 if --fail-on holds, 3 if no figure can be judged.
    """
    from kvtune.base.errors import EXIT_FAILED, EXIT_UNKNOWN, KvtuneError, UsageError
    from kvtune.cli.views.answer import print_answer
    from kvtune.data.run.file import read_run
    from kvtune.reading.analysis.comparison.compare import NOT_JUDGED, average
    from kvtune.reading.analysis.comparison.fail_on import parse_fail_on
    from kvtune.reading.analysis.rebuild import workload_of
    from kvtune.reading.report.comparison import compared, document
    from kvtune.reading.report.contrast import contrast

    if len(query.runs) < 2:
        raise UsageError("compare needs at least two run files", "kvtune compare A.kvrun B.kvrun")

    condition = parse_fail_on(query.fail_on) if query.fail_on else None
    loaded = [read_run(path) for path in query.runs]
    # Only --json and --fail-on need the workload: their summaries have misses by cause.
    workload = workload_of(loaded[0], query.trace) if query.json or condition else None
    made = contrast(loaded, [path.stem for path in query.runs], workload)
    if made.differences and not query.anyway:
        raise UsageError(
            f"these runs did not do the same work: {'; '.join(made.differences)}",
            "add --anyway to compare them",
        )
    failed: list[str] = []
    if condition is not None and condition.timed and not made.times_judged and not query.anyway:
        raise KvtuneError(
            f"--fail-on {condition.timed[0]!r} is about times, and times of one run a side are not judged",
            f"add --anyway, or run the sides in turns: {line}"
            if (line := made.repeated_with("--fail-on", query.fail_on))
            else "give each side several runs (profile --repeat 3), or add --anyway to decide on these two",
            EXIT_UNKNOWN,
        )
    if condition is not None:
        first, *others = (average(side.summaries) for side in made.sides)
        for side, other in zip(made.sides[1:], others, strict=True):
            outcome = condition.evaluate(first, other)
            failed += [f"{side.name}: {reason}" for reason in outcome.reasons if outcome.holds]
    answer = compared(made, failed)
    print_answer(answer, document(made), json=query.json, md=query.md, page=query.page)
    for line in failed:
        always(f"--fail-on holds, {line}")
    if failed:
        return EXIT_FAILED
    judged = any(figure.verdict != NOT_JUDGED for side in answer.comparisons for figure in side.figures)
    return 0 if judged or condition is not None or answer.servers is not None else EXIT_UNKNOWN
