"""`kvtune profile --ablate`: the effect of each core switch and garbage collector setting."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime, timedelta
from math import inf

from kvtune.cli.notices import always
from kvtune.cli.options import print_json
from kvtune.cli.views.answer import open_page
from kvtune.cli.views.plan import announce, engine_plan, minutes
from kvtune.engine.ablate import Variant, folder_of, run_files, variants
from kvtune.engine.experiment import INTERRUPTED, Ended, Progress, RunFiles, experiment
from kvtune.engine.profile import EngineBench, check_output
from kvtune.engine.setup import Real, Setup
from kvtune.errors import EXIT_INTERRUPTED, KvtuneError
from kvtune.run.extras import AblationResult, AblationVariant
from kvtune.run.file import read_run, store_extra
from kvtune.run.types import Run

REPEATS = 3
"""Runs of each variant if --repeat is not given. With two, the intervals are too wide to show much."""


def run_ablation(
    setup: Setup,
    bench: EngineBench,
    only: str,
    repeats: int,
    budget_min: float,
    *,
    as_json: bool,
    opened: bool = False,
) -> int:
    """Run all variants, store the result in the baseline's first run file, print it. KvtuneError without a baseline."""
    from kvtune.analysis.comparison.ablation import stored
    from kvtune.analysis.run import RunAnalysis
    from kvtune.report.console.summary import print_section
    from kvtune.report.pages.run import run_page
    from kvtune.report.sections import ablation
    from kvtune.run.signature import run_identity, write_own

    chosen = variants(setup, tuple(name for name in only.split(",") if name))
    repeats = repeats if repeats > 1 else REPEATS
    check_output(bench.output)
    files = run_files(setup, bench)
    _tell_plan(setup, bench, chosen, files, repeats, budget_min)
    ended = experiment(
        chosen,
        repeats,
        files.measure,
        kept=files.kept,
        seconds=files.seconds,
        budget_s=60 * budget_min or inf,
        before=_tell,
    )
    if not chosen[0].runs:
        folder = folder_of(setup, bench)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        if chosen[0].failed and ended.error is not None:
            raise ended.error
        raise KvtuneError(
            f"no run of --ablate's baseline ended: {ended.why}",
            "run the same command again: it resumes where this one stopped"
            if any(variant.runs for variant in chosen)
            else "no run is kept: the same command starts from the beginning",
            EXIT_INTERRUPTED if ended.why == INTERRUPTED else 1,
        )
    first = chosen[0].runs[0]
    run = _store(chosen, repeats, ended)
    analysis = RunAnalysis(run, setup.load.built())
    html = run_page(analysis)
    page = write_own(html.encode(), first.with_suffix(".html"), run_identity(run.header))
    result = stored(run)
    assert result is not None
    if not ended.why:
        files.end()
    if as_json:
        places = {"run_file": str(first), "page": str(page), "folder": str(folder_of(setup, bench))}
        print_json({"ablation": result, **places})
    else:
        print_section(ablation.section(analysis))
        print(f"run file  {first}")
        print(f"page      {page}")
    if opened:
        open_page(page)
    if ended.why:
        always(f"kvtune: {ended.why}; run the same command again to resume")
    return EXIT_INTERRUPTED if ended.why == INTERRUPTED else 0


def _tell_plan(
    setup: Setup,
    bench: EngineBench,
    chosen: Sequence[Variant],
    files: RunFiles,
    repeats: int,
    budget_min: float,
) -> None:
    """Print the planned runs and how long they take, before anything starts."""
    total = len(chosen) * repeats
    held = sum(min(files.held(variant), repeats) for variant in chosen)
    say = [f"--ablate: {len(chosen)} variants x {repeats} = {total} engine runs"]
    say += [f"{held} of them done before"] if held else []
    say += [f"stops after {budget_min:g} min"] if budget_min else []
    print("; ".join(say), file=sys.stderr)
    print(f"  {', '.join(f'{v.name} {v.turned}'.strip() for v in chosen)}", file=sys.stderr, flush=True)
    if total > held:
        source = "engine" if isinstance(setup.device, Real) else "host"
        known = folder_of(setup, bench) if held else bench.output
        announce(engine_plan(setup.model, setup.load.built(), total - held, known, source=source))


def _tell(now: Progress) -> None:
    left = ""
    if now.left_s is not None:
        at = datetime.now() + timedelta(seconds=now.left_s)
        left = f"; {minutes(now.left_s)} left, until {at:%H:%M}"
    print(f"{now.number}/{now.total} {now.name}{left}", file=sys.stderr, flush=True)


def _store(chosen: Sequence[Variant], repeats: int, ended: Ended) -> Run:
    """Store the result in the baseline's first run file, and return that run."""
    from kvtune.analysis.comparison.ablation import figures

    sides = [
        AblationVariant(
            name=variant.name,
            turned=variant.turned,
            settings=dict(variant.settings),
            runs=[figures(read_run(path)) for path in variant.runs],
            files=[path.name for path in variant.runs],
            failed=[variant.failed] if variant.failed else [],
        )
        for variant in chosen
    ]
    path = chosen[0].runs[0]
    result = AblationResult(planned=len(chosen) * repeats, repeats=repeats, why=ended.why, sides=sides)
    stored = read_run(path).with_extra(ablation=result)
    store_extra(path, ablation=result)
    return stored
