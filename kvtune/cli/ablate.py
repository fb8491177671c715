"""`kvtune profile --ablate`: what each switch of the core and each setting of the collector is worth."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from kvtune.cli.notices import always
from kvtune.cli.views.browser import open_page
from kvtune.cli.views.plan import minutes
from kvtune.engine.ablate import (
    BASELINE,
    Ablated,
    AblationProgress,
    Variant,
    ablate,
    ended,
    folder_of,
    known,
    variants,
)
from kvtune.engine.messages import Event
from kvtune.engine.profile import ProfileJob, check_output
from kvtune.errors import EXIT_INTERRUPTED, KvtuneError
from kvtune.run.durations import known_durations
from kvtune.run.file import read_run, store_extra
from kvtune.run.types import Run

FEWEST = 2
"""Fewest runs of each variant that give an interval."""
REPEATS = 3
"""Runs of each variant without --repeat: with two, intervals are too wide to show much."""


def run_ablation(
    job: ProfileJob, only: str, repeats: int, budget_min: float, *, as_json: bool, opened: bool = False
) -> int:
    """Run every variant, store the result in the baseline's first run, print it. KvtuneError without a baseline."""
    from kvtune.analysis.comparison.ablation import stored
    from kvtune.analysis.run import RunAnalysis
    from kvtune.report.console.ablation import plain, print_ablation
    from kvtune.report.pages.run import run_page
    from kvtune.run.signature import run_identity, write_own

    chosen = variants(job, tuple(name for name in only.split(",") if name))
    repeats = max(repeats, FEWEST) if repeats > 1 else REPEATS
    check_output(job.output)
    _tell_plan(job, chosen, repeats, budget_min)
    ablated = ablate(job, chosen, repeats, _tell, budget_s=60 * budget_min)
    baseline = ablated.made[BASELINE].files
    if not baseline:
        folder = folder_of(job)
        kept = known(job, chosen, repeats)[0]
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        raise KvtuneError(
            f"no run of --ablate's baseline ended: {ablated.why}",
            "run the same command again: it resumes where this one stopped"
            if kept
            else "no run is kept: the same command starts from the beginning",
            EXIT_INTERRUPTED if ablated.why == "interrupted" else 1,
        )
    run = _store(ablated, chosen, repeats)
    html = run_page(RunAnalysis(run, job.workload))
    page = write_own(html.encode(), baseline[0].with_suffix(".html"), run_identity(run.header))
    result = stored(run)
    assert result is not None
    if not ablated.why:
        ended(job)
    if as_json:
        files = {"run_file": str(baseline[0]), "page": str(page), "folder": str(folder_of(job))}
        print(json.dumps({"ablation": plain(result), **files}))
    else:
        print_ablation(result)
        print(f"run file  {baseline[0]}")
        print(f"page      {page}")
    if opened:
        open_page(page)
    if ablated.why:
        always(f"kvtune: {ablated.why}; run the same command again to resume")
    return EXIT_INTERRUPTED if ablated.why == "interrupted" else 0


def _tell_plan(job: ProfileJob, chosen: tuple[Variant, ...], repeats: int, budget_min: float) -> None:
    """Print what is going to run and how long it takes, before anything starts."""
    total = len(chosen) * repeats
    held, run_s = known(job, chosen, repeats)
    if run_s is None:
        run_s = known_durations(
            job.output, job.model, job.workload.hash, "engine" if job.device is None else "host"
        ).run_s
    say = [f"--ablate: {len(chosen)} variants x {repeats} = {total} engine runs"]
    say += [f"{held} of them done before"] if held else []
    if run_s is not None:
        say.append(f"at about {run_s:.0f} s each that takes {minutes(run_s * (total - held))}")
    else:
        say.append(
            "each starts an engine (20 to 60 s) and runs the workload; the total time is known after the first"
        )
    say += [f"stops after {budget_min:g} min"] if budget_min else []
    print("; ".join(say), file=sys.stderr)
    print(f"  {', '.join(f'{v.name} {v.turned}'.strip() for v in chosen)}", file=sys.stderr, flush=True)


def _tell(now: AblationProgress) -> Callable[[Event], None]:
    left = ""
    if now.left_s is not None:
        at = datetime.now() + timedelta(seconds=now.left_s)
        left = f"; {minutes(now.left_s)} left, until {at:%H:%M}"
    print(f"{now.number}/{now.total} {now.name}{left}", file=sys.stderr, flush=True)
    return lambda event: None


def _store(ablated: Ablated, chosen: tuple[Variant, ...], repeats: int) -> Run:
    """Store the result in the baseline's first run file, which its page is drawn from."""
    from kvtune.analysis.comparison.ablation import AblationSide, as_result, figures

    sides = []
    for variant in chosen:
        made = ablated.made[variant.name]
        runs = tuple(figures(read_run(path)) for path in made.files)
        files = tuple(path.name for path in made.files)
        sides.append(
            AblationSide(variant.name, variant.turned, variant.settings, runs, files, tuple(made.failed))
        )
    path: Path = ablated.made[BASELINE].files[0]
    run = read_run(path)
    result = as_result(sides, planned=ablated.planned, repeats=repeats, why=ablated.why)
    stored = run.with_extra(ablation=result)
    store_extra(path, ablation=result)
    return stored
